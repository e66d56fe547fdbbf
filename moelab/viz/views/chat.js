// A conversation with a model: what was said, the experts of its latest token, its memory, and what it would take
// otherwise. All that is known comes from the kernel; what is asked goes there as lines of `moelab chat`.

const AS_IS = "as it is";
const REPLAYED = {                              // what /replay takes: name → its label, its values
  memory: ["memory", ["10%", "25%", "50%", "75%", "100%"]],
  cache: ["cache policy", []],
  prefetch: ["prefetching", ["none", "previous", "perfect"]],
  device: ["machine", []],
};
// they differ in shape and in lightness, too
const LOOKS = {
  rest: ["in memory, not routed", "#b0b0b0", "square"],
  hit: ["routed, in memory", "#009E73", "circle"],
  read: ["routed, read for this token", "#D55E00", "x"],
};
const LEFT = 52, TOP = 18;

function element(kind, parent, properties = {}, style = "") {
  const made = Object.assign(document.createElement(kind), properties);
  made.style.cssText = style;
  parent.append(made);
  return made;
}

function paint(context, [, colour, symbol], x, y, r, ink) {
  context.beginPath();
  if (symbol === "x") {
    context.moveTo(x - r, y - r), context.lineTo(x + r, y + r);
    context.moveTo(x - r, y + r), context.lineTo(x + r, y - r);
    context.lineWidth = Math.max(1.5, r / 2.5);
    context.strokeStyle = colour;
    context.stroke();
    return;
  }
  if (symbol === "circle") context.arc(x, y, r, 0, 7);
  else context.rect(x - 0.6 * r, y - 0.6 * r, 1.2 * r, 1.2 * r);
  context.fillStyle = colour;
  context.fill();
  if (symbol === "square") return;
  context.lineWidth = 0.7;
  context.strokeStyle = ink;
  context.stroke();
}

const size = (bytes) => bytes >= 1e9 ? `${(bytes / 1e9).toPrecision(3)} GB` : `${(bytes / 1e6).toPrecision(3)} MB`;

function render({ model, el }) {
  const line = "display:flex;gap:8px;align-items:center;flex-wrap:wrap;margin:6px 0";
  const box = "font:inherit;color:inherit;background:var(--jp-layout-color1,Canvas);border:1px solid currentColor;padding:3px 6px";
  const root = element("div", el, { className: "moelab-chat" },
    "color:var(--jp-ui-font-color1,#222);font-size:14px;line-height:1.5;max-width:100%");
  root.dataset.lmSuppressShortcuts = "true";    // or Jupyter would take the keys
  const scroll = element("div", root, { tabIndex: 0 },    // what is last stays in sight while it grows
    "max-height:22em;overflow:auto;display:flex;flex-direction:column-reverse");
  const log = element("div", scroll);
  log.setAttribute("role", "log");
  log.setAttribute("aria-label", "conversation");
  const form = element("div", root, {}, line);
  const labelled = (kind, parent, label, properties, style) => {
    const made = element(kind, parent, properties, style);
    made.setAttribute("aria-label", label);
    return made;
  };
  const field = labelled("input", form, "say something",
    { type: "text", placeholder: "say something", autocomplete: "off" }, `flex:1;min-width:8em;${box}`);
  const button = (parent, text, type, title) => element("button", parent,
    { textContent: text, type, title, className: "jupyter-button widget-button" }, "width:auto;margin:0");
  const send = button(form, "send", "button", "have it answered (Enter)");
  const stop = button(form, "stop", "button", "end the answer; what was said stays");
  const status = element("div", root, {}, "min-height:1.5em;font-variant-numeric:tabular-nums");
  status.setAttribute("role", "status");

  const canvas = element("canvas", root, {}, "display:block;width:100%");
  canvas.setAttribute("role", "img");
  const legend = element("div", root, {}, line);
  const samples = Object.values(LOOKS).map((look) => {
    const one = element("span", legend, {}, "display:inline-flex;gap:4px;align-items:center");
    const sample = element("canvas", one, { width: 32, height: 32 }, "width:16px;height:16px");
    element("span", one, { textContent: look[0] });
    return [look, sample];
  });

  const memory = element("label", root, {}, line);
  element("span", memory, { textContent: "memory for experts" });
  const slider = element("input", memory, { type: "range", min: 1, max: 100, step: 1 }, "flex:1;min-width:10em");
  const amount = element("span", memory, {}, "min-width:14em;font-variant-numeric:tabular-nums");
  const row = element("div", root, {}, line);
  element("span", row, { textContent: "what if, simulated:" });
  const { cache, device } = model.get("shown");
  REPLAYED.cache[1] = cache, REPLAYED.device[1] = device;
  const menus = Object.entries(REPLAYED).map(([name, [label, values]]) => {
    const one = element("label", row, { textContent: `${label} ` });
    const menu = element("select", one, { name }, box);
    [AS_IS, ...values].forEach((value) => element("option", menu, { textContent: value, value }));
    menu.onchange = () => {
      const asked = menus.filter((of) => of.value !== AS_IS).map((of) => `${of.name}=${of.value}`);
      if (asked.length) model.send(`/replay ${asked.join(" ")}`);
    };
    return menu;
  });

  let held = false, cell = 10;                  // held: while a person moves the slider
  function tell(percent, bytes, whole) {
    amount.textContent = whole
      ? `${size(bytes)}, ${percent} % of ${size(whole)}`
      : "off: all experts are in memory; open the model with memory= to move it";
  }

  function draw() {
    const { shape: [L, E], experts: [kept, routed, read], whole } = model.get("shown");
    const here = whole ? kept : Array.from({ length: L * E }, (_, i) => [Math.floor(i / E), i % E]);
    const wide = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!wide) return;
    cell = Math.max(3, Math.min(22, (wide - LEFT - 4) / E));
    const high = TOP + L * cell + 4;
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(high * ratio)) {
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(high * ratio);
      canvas.style.height = `${high}px`;
    }
    const context = canvas.getContext("2d"), ink = getComputedStyle(root).color;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, wide, high);
    context.fillStyle = ink;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const down = Math.max(1, Math.ceil(14 / cell)), across = Math.max(1, Math.ceil(30 / cell));
    for (let l = 0; l < L; l += down) context.fillText(l ? `${l}` : "layer 0", 2, TOP + (l + 0.5) * cell);
    for (let e = 0; e < E; e += across) context.fillText(`${e}`, LEFT + e * cell, 8);
    const loaded = new Set(read.map(String)), seen = new Set(routed.map(String));
    const at = ([l, e], look, r) => paint(context, look, LEFT + (e + 0.5) * cell, TOP + (l + 0.5) * cell, r * cell, ink);
    here.filter((key) => !seen.has(String(key))).forEach((key) => at(key, LOOKS.rest, 0.4));
    const missed = routed.filter((key) => loaded.has(String(key)));
    routed.forEach((key) => loaded.has(String(key)) ? at(key, LOOKS.read, 0.38) : at(key, LOOKS.hit, 0.42));
    canvas.setAttribute("aria-label", `a grid, a row a layer and a column an expert: of ${L * E} experts ${here.length} are in `
      + `memory; the latest token visits ${routed.length}, of which ${missed.length} were read for it`);
    samples.forEach(([look, sample]) => {
      const small = sample.getContext("2d");
      small.clearRect(0, 0, 32, 32);
      paint(small, look, 16, 16, 12, ink);
    });
  }

  function show() {
    const { log: said, status: told, memory: bytes, whole } = model.get("shown");
    log.replaceChildren();
    for (const [who, text] of said) {
      const one = element("div", log, {}, "display:flex;gap:0.8em;margin:2px 0");
      element("b", one, { textContent: who }, "flex:0 0 3.5em;text-align:right");
      const style = { you: "font-weight:600", model: "" }[who] ?? "font-size:13px;font-style:italic;opacity:0.85";
      element("span", one, { textContent: text.trimEnd() || "…" }, `white-space:pre-wrap;min-width:0;${style}`);
    }
    // an answer is over when its status follows, or when there is none of it
    const at = said.findLastIndex(([who]) => who === "model"), after = said.slice(at + 1);
    const busy = at >= 0 && said[at][1] !== "\n" && !after.some(([, text]) => text.startsWith("["));
    send.disabled = busy;
    stop.disabled = !busy;
    status.textContent = busy ? told : "";      // it stays above as a line of what was said
    slider.disabled = !whole;
    if (!held) {
      slider.value = whole ? Math.round(100 * bytes / whole) : 100;
      tell(slider.value, bytes, whole);
    }
    draw();
  }

  send.onclick = () => {
    const text = field.value.trim();
    if (!text || send.disabled && !text.startsWith("/")) return;
    model.send(text);
    field.value = "";
  };
  field.onkeydown = (event) => {
    event.stopPropagation();                    // Jupyter has keys of its own
    if (event.key === "Enter") send.onclick();
  };
  stop.onclick = () => model.send("");
  slider.oninput = () => {
    held = true;
    const { whole } = model.get("shown");
    tell(slider.value, whole * slider.value / 100, whole);
  };
  slider.onchange = () => {                     // let go
    held = false;
    model.send(`/memory ${slider.value}%`);
  };
  const resized = new ResizeObserver(draw), look = new MutationObserver(() => setTimeout(draw, 50));
  resized.observe(root);
  look.observe(document.body, { attributes: true });
  model.on("change:shown", show);
  show();
  return () => {
    resized.disconnect();
    look.disconnect();
    model.off("change:shown", show);
  };
}

export default { render };
