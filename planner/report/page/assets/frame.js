"use strict";
// The frame: theme, contents, copying, and what print needs.
page.theme = () => {
  const button = document.getElementById("theme");
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  const name = () => { button.textContent = page.isDark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => {
    const chosen = page.isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = chosen;
    try { sessionStorage.setItem("planner-theme", chosen); } catch { /* kept for this page only */ }
    name();
    page.recolour();
  });
  preferred.addEventListener("change", () => { name(); page.recolour(); });
  name();
};

page.contents = () => {
  const button = document.getElementById("contents");
  const open = (yes) => button.setAttribute("aria-expanded", String(yes));
  const links = new Map([...document.querySelectorAll("#list a")].map((a) => [a.hash.slice(1), a]));
  button.addEventListener("click", () => open(button.getAttribute("aria-expanded") !== "true"));
  const shown = new Set();
  let chosen = null; // a short last section cannot come to the top of the window
  document.getElementById("list").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link) return;
    open(false);
    chosen = link.hash.slice(1);
    document.getElementById(chosen).closest("details.group")?.setAttribute("open", "");
    mark();
  });
  for (const moved of ["wheel", "touchmove", "keydown", "pointerdown"]) {
    addEventListener(moved, () => { chosen = null; }, { passive: true });
  }
  const sections = [...document.querySelectorAll("main section")];
  const mark = () => {
    const current = chosen ?? sections.find((section) => shown.has(section.id))?.id;
    for (const [id, link] of links) {
      if (id === current) link.setAttribute("aria-current", "location");
      else link.removeAttribute("aria-current");
    }
  };
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) shown.add(target.id); else shown.delete(target.id);
    }
    mark();
  }, { rootMargin: "-10% 0px -60% 0px" });
  sections.forEach((section) => seen.observe(section));
};

// Some browsers give files no clipboard: then a field that holds the text is copied, and where that
// is refused too, the text is selected for the person.
page.copyText = async (pre) => {
  try {
    await navigator.clipboard.writeText(pre.textContent);
    return true;
  } catch {
    const focused = document.activeElement;
    const field = document.createElement("textarea");
    field.className = "unseen";
    field.value = pre.textContent;
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    focused.focus();
    if (!copied) getSelection().selectAllChildren(pre);
    return copied;
  }
};

page.copying = () => {
  for (const button of document.querySelectorAll("button.copy")) {
    const word = button.firstChild;
    button.addEventListener("click", async () => {
      const copied = await page.copyText(button.closest(".copyable").querySelector("pre"));
      word.data = copied ? "Copied" : "Selected";
      page.say(copied ? "Copied." : "Selected. Press Ctrl and C to copy.");
      setTimeout(() => { word.data = "Copy"; page.say(""); }, 2000);
    });
  }
};

// Paper shows everything: folds open, all charts, as wide as a page and in light colours,
// high ones lower than on a screen.
page.PAPER_PX = 700;
page.print = (yes) => {
  if (page.printing === yes) return;
  page.printing = yes;
  for (const fold of document.querySelectorAll("details:not(.unprinted, .group)")) {
    if (yes && !fold.open) { fold.open = true; fold.dataset.folded = "yes"; }
    else if (!yes && fold.dataset.folded) { fold.open = false; delete fold.dataset.folded; }
  }
  document.documentElement.classList.toggle("printing", yes);
  if (page.ready && yes) {
    [...document.querySelectorAll("[data-chart]")].filter((chart) => chart.offsetWidth).forEach(page.draw);
  }
  for (const target of page.drawn()) {
    const high = parseFloat(target.style.height), height = Math.min(high, Math.max(290, 0.7 * high));
    const paper = { width: page.PAPER_PX, height, autosize: false };
    page.colourAnew(target, yes ? paper : { width: null, height: null, autosize: true });
  }
};

page.frame = () => {
  page.theme();
  page.contents();
  page.copying();
  for (const fold of document.querySelectorAll("details")) {
    fold.addEventListener("toggle", () => { if (fold.open) page.resize(fold); });
  }
  addEventListener("beforeprint", () => page.print(true));
  addEventListener("afterprint", () => page.print(false));
  matchMedia("print").addEventListener("change", (event) => page.print(event.matches));
};

page.frame();
