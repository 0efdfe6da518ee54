"use strict";
// A tree of boxes shows fewer levels where it is narrow, so that their names can be read.
page.scripts.tree = (target) => {
  const fit = () => {
    const levels = target.offsetWidth < 520 ? 3 : target.offsetWidth < 900 ? 4 : 5;
    if (!target.offsetWidth || target.data[0].maxdepth === levels) return;
    const between = levels === 3 ? "<br>" : "  ";
    Plotly.restyle(target, { maxdepth: levels, texttemplate: `%{label}${between}%{text}` });
  };
  fit();
  new ResizeObserver(fit).observe(target);
};
