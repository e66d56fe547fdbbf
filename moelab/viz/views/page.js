// A view's page: all that its controls can show was computed before, and lies packed in the page.

async function unpacked(id) {
  const packed = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(packed, (sign) => sign.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function made(kind, parent, properties = {}) {
  return parent.appendChild(Object.assign(document.createElement(kind), properties));
}

const { controls, parts, frames, table, config } = JSON.parse(await unpacked("frames"));
const library = { exports: {} };
new Function("module", await unpacked("plotly"))(library);
const Plotly = library.exports;
const [bar, view, caption, command] = ["controls", "view", "caption", "command"].map((id) => document.getElementById(id));
const plots = frames[0].figures.map(() => made("div", view));
document.getElementById("numbers").innerHTML = table;

function show() {
  const frame = frames[controls.reduce((place, { steps, at }) => place * steps.length + at, 0)];
  caption.textContent = frame.caption;
  command.textContent = frame.command;
  frame.figures.forEach(([layout, ...traces], i) => {
    const { data, layout: look } = structuredClone({ data: traces.map((n) => parts[n]), layout: parts[layout] });
    plots[i].setAttribute("role", "img");
    plots[i].setAttribute("aria-label", frame.alt);
    Plotly.react(plots[i], data, { ...look, width: undefined, autosize: true }, config);
  });
}

for (const control of controls) {
  const line = made("label", bar, { textContent: control.label });
  const input = control.slides
    ? made("input", line, { type: "range", min: 0, max: control.steps.length - 1, value: control.at })
    : made("select", line);
  if (!control.slides) control.steps.forEach((text) => made("option", input, { textContent: text }));
  input[control.slides ? "value" : "selectedIndex"] = control.at;
  const told = made("output", line, { textContent: control.slides ? control.steps[control.at] : "" });
  input.oninput = () => {
    control.at = Number(control.slides ? input.value : input.selectedIndex);
    if (control.slides) told.textContent = control.steps[control.at];
    show();
  };
}
show();
