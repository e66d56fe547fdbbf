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

function frames({ controls, parts, frames }) {
  const whole = (places) => Object.fromEntries(Object.entries(places).map(([name, place]) => [name, parts[place]]));
  const hosts = frames[0].figures.map(() => element("div", view, { className: "figure" })), states = hosts.map(() => ({}));
  const played = controls.find((control) => control.slides) ?? controls[0];
  let player = null;

  function show() {
    const frame = frames[controls.reduce((place, { steps, at }) => place * steps.length + at, 0)];
    caption.textContent = frame.caption;
    command.textContent = frame.command;
    frame.figures.forEach(([layout, ...data], i) =>
      drawn(hosts[i], { data: data.map(whole), layout: { ...whole(layout), alt: frame.alt } }, states[i], go));
  }

  function go(value) {                          // to the nearest place that the page has
    const far = played.steps.map((step) => Math.abs(Number(step) - value));
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
