// A plotly figure that is changed in place. The kernel gives a page plotly.js once, however many figures there are.

async function load(model) {
  const library = await model.widget_manager.get_model(model.get("library").slice("IPY_MODEL_".length));
  const module = { exports: {} };
  new Function("module", library.get("code"))(module);
  return module.exports;
}

async function render({ model, el }) {
  const loading = (globalThis.moelabPlotly ??= load(model));
  loading.catch(() => (globalThis.moelabPlotly = undefined));     // the next figure tries again
  const Plotly = await loading;
  const plot = document.createElement("div");
  let wide = 0;
  el.append(plot);

  function draw() {
    wide = el.clientWidth;
    if (!wide) return;                          // hidden; when it is shown, its width changes
    const { data, layout } = structuredClone(model.get("figure"));      // plotly writes into what it is given
    const first = !plot.on;
    // while the axes mean the same, zoom and hidden lines stay as a person has left them
    const uirevision = JSON.stringify([layout.xaxis?.title, layout.yaxis?.title]);
    Plotly.react(plot, data, { ...layout, width: wide, uirevision }, { displaylogo: false });
    if (first) plot.on("plotly_click", ({ points: [point] }) =>
      model.send({ curve: point.curveNumber, point: point.pointNumber, data: point.customdata ?? null }));
  }

  const size = new ResizeObserver(() => el.clientWidth !== wide && draw());
  size.observe(el);
  model.on("change:figure", draw);
  return () => {
    model.off("change:figure", draw);
    size.disconnect();
    Plotly.purge(plot);
  };
}

export default { render };
