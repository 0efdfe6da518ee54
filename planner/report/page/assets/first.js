"use strict";
// Before anything is shown: that scripts run, and the theme that was chosen in this visit.
document.documentElement.classList.add("js");
try {
  const kept = sessionStorage.getItem("planner-theme");
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
} catch { /* a browser may keep nothing for files */ }
