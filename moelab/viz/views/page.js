// A view's page: all that its controls can show was computed before, and lies packed in the page.

const [bar, view, caption, command, theme] = ["controls", "view", "caption", "command", "theme"]
  .map((id) => document.getElementById(id));

const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.style.colorScheme || (dark.matches ? "dark" : "light")) === "dark";
const told = () => (theme.textContent = isDark() ? "☀ light" : "☾ dark");
theme.hidden = false;
theme.onclick = () => {
  document.documentElement.style.colorScheme = isDark() ? "light" : "dark";
  document.body.dataset.look = told();          // a canvas is painted again
};
dark.onchange = () => (document.body.dataset.look = told());
told();

async function unpacked(id) {
  const packed = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(packed, (sign) => sign.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

// plotly packs arrays of numpy
const ARRAYS = { f8: Float64Array, f4: Float32Array, i4: Int32Array, i2: Int16Array, i1: Int8Array, u2: Uint16Array, u1: Uint8Array };
const numbers = (part) => (part?.bdata
  ? [...new ARRAYS[part.dtype](Uint8Array.from(atob(part.bdata), (sign) => sign.charCodeAt(0)).buffer)] : part);

function frames({ controls: every, parts, frames }) {
  const controls = every.filter(({ steps }) => steps.length > 1)
    .map((control) => ({ ...control, at: control.steps.indexOf(control.at) }));
  const figures = parts.map(numbers);
  const whole = (places) => Object.fromEntries(Object.entries(places).map(([name, place]) => [name, figures[place]]));
  const hosts = frames[0][3].map(() => element("div", view, { className: "figure" })), states = hosts.map(() => ({}));
  const played = controls.find(({ steps }) => typeof steps[0] === "number") ?? controls[0];
  let player = null;

  function show() {
    const [said, alt, line, shown] = frames[controls.reduce((place, { steps, at }) => place * steps.length + at, 0)];
    caption.textContent = said;
    command.textContent = line;
    shown.forEach(([layout, ...data], i) =>
      drawn(hosts[i], { data: data.map(whole), layout: { ...whole(layout), alt } }, states[i], go));
  }

  function go(value) {                          // to the nearest place that the page has
    const far = played.steps.map((step) => Math.abs(step - value));
    player?.go(far.indexOf(Math.min(...far)));
  }

  for (const control of controls) if (control !== played) {
    const line = element("label", bar, { textContent: `${control.label} ` }), menu = element("select", line);
    control.steps.forEach((text) => element("option", menu, { textContent: text }));
    menu.selectedIndex = control.at;
    menu.oninput = () => {
      control.at = menu.selectedIndex;
      show();
    };
  }
  if (played) {
    const output = document.createElement("output");
    player = transport(bar, document, played.steps.length, played.label, 2, (place) => {
      played.at = place;
      show();
      return (output.textContent = `${played.label}: ${played.steps[place]}`);
    });
    player.bar.append(output);
    player.go(played.at);
  } else show();
  let wide = view.clientWidth;
  new ResizeObserver(() => {
    if (view.clientWidth !== wide) show();
    wide = view.clientWidth;
  }).observe(view);
}

const content = await unpacked("content");
if (content.frames) frames(content);
else render({ el: view, model: { get: (name) => content[name], set() {}, save_changes() {}, on() {}, off() {} } });
