// A plotly figure that is changed in place. The kernel gives a page plotly.js once, however many figures there are.

// On a dark page in the opposite lightness, the hues as they are; but in a map light stays light.
const DARK = `:is([data-jp-theme-light="false"], [data-vscode-theme-kind*="dark"]) .moelab-chart`;
const LOOK = `${DARK} { filter: invert(0.93) hue-rotate(180deg); }
${DARK} :is(.heatmaplayer, .treemaplayer, .cbfills) { filter: invert(1) hue-rotate(180deg); }`;

async function load(model) {
  const library = await model.widget_manager.get_model(model.get("library").slice("IPY_MODEL_".length));
  const module = { exports: {} };
  new Function("module", library.get("code"))(module);
  return module.exports;
}

// A map in other colours. plotly would draw and measure its thousand rectangles again, which takes a third of a second.
function recolour(Plotly, plot, { text, marker }) {
  const { colors, colorscale, cmin, cmax, colorbar } = marker, last = colorscale.length - 1;
  const steps = colorscale.map(([, hex]) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  for (const node of plot.calcdata[0]) {
    const at = last * Math.max(0, Math.min(1, (colors[node.i] - cmin) / (cmax - cmin || 1)));
    const below = Math.min(Math.floor(at), last - 1);
    const mixed = steps[below].map((part, i) => Math.round(part + (at - below) * (steps[below + 1][i] - part)));
    node.color = colors[node.i] === null ? "#444" : `rgb(${mixed})`;
  }
  plot.data[0].text = text;
  Object.assign(plot.data[0].marker, { colors, cmin, cmax, colorbar });
  // neither changes anything: the one has rectangles styled again, the other colour bars
  Plotly.update(plot, { opacity: 1 }, { "coloraxis.colorbar.len": 1 });
}

async function render({ model, el }) {
  const loading = (globalThis.moelabPlotly ??= load(model));
  loading.catch(() => (globalThis.moelabPlotly = undefined));     // the next figure tries again
  const Plotly = await loading;
  const plot = document.createElement("div");
  let wide = 0, frame = "";                     // of a map all but its colours
  plot.style.contain = "layout style";          // the page around it stays as it is
  plot.className = "moelab-chart";
  el.append(plot, Object.assign(document.createElement("style"), { textContent: LOOK }));

  // for the saved notebook, apart: what nobody has scrolled to is not drawn
  async function picture() {
    const { data, layout } = structuredClone(model.get("figure")), width = el.clientWidth || 900;
    const url = await Plotly.toImage({ data, layout: { ...layout, width } }, { width, height: layout.height ?? 450 });
    model.send({ png: true }, undefined, [await (await fetch(url)).arrayBuffer()]);
  }

  let waiting = 0;
  function changed() {
    draw();
    clearTimeout(waiting);
    waiting = setTimeout(picture, 2000);        // when nobody turns anything any more
  }

  function draw() {
    wide = el.clientWidth;
    if (!wide) return;                          // hidden; when it is shown, its width changes
    const { data, layout } = structuredClone(model.get("figure"));      // plotly writes into what it is given
    const first = !plot.on;
    // while the axes mean the same, zoom and hidden lines stay as a person has left them
    const uirevision = JSON.stringify([layout.xaxis?.title, layout.yaxis?.title]);
    const before = frame, [map] = data;
    frame = map?.type === "treemap"
      ? JSON.stringify([wide, layout, { ...map, text: 0, marker: map.marker.showscale }]) : "";
    if (frame && frame === before) return recolour(Plotly, plot, map);
    Plotly.react(plot, data, { ...layout, width: wide, uirevision }, { displayModeBar: false });
    if (!first) return;
    plot.on("plotly_click", ({ points: [point] }) =>
      model.send({ curve: point.curveNumber, point: point.pointNumber, data: point.customdata ?? null }));
  }

  const size = new ResizeObserver(() => el.clientWidth !== wide && draw());
  size.observe(el);
  model.on("change:figure", changed);
  picture();
  return () => {
    model.off("change:figure", changed);
    clearTimeout(waiting);
    size.disconnect();
    Plotly.purge(plot);
  };
}

export default { render };
