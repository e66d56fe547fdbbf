// The player of the token scrubber: everything was computed before, so nothing here asks the kernel.

const SPEEDS = [["1 a second", 1], ["2 a second", 2], ["5 a second", 5], ["10 a second", 10], ["30 a second", 30]];
const LEFT = 44, TOP = 18;

function shape(context, symbol, x, y, r) {
  context.beginPath();
  if (symbol === "circle") context.arc(x, y, r, 0, 7);
  else if (symbol === "square") context.rect(x - 0.7 * r, y - 0.7 * r, 1.4 * r, 1.4 * r);
  else if (symbol === "x") {
    context.moveTo(x - r, y - r), context.lineTo(x + r, y + r);
    context.moveTo(x - r, y + r), context.lineTo(x + r, y - r);
  } else {
    const points = symbol === "diamond" ? [[0, -1], [1, 0], [0, 1], [-1, 0]] : [[0, -1], [1, 0.8], [-1, 0.8]];
    points.forEach(([a, b], i) => context[i ? "lineTo" : "moveTo"](x + r * a, y + r * b));
    context.closePath();
  }
}

function paint(context, [, colour, symbol], x, y, r, ink) {
  if (!symbol) return;
  shape(context, symbol, x, y, r);
  if (symbol === "x" || symbol.endsWith("-open")) {
    context.lineWidth = Math.max(1.5, r / 2.5);
    context.strokeStyle = colour;
    context.stroke();
  } else {
    context.fillStyle = colour;
    context.fill();
    if (symbol !== "square") {
      context.lineWidth = 0.7;
      context.strokeStyle = ink;
      context.stroke();
    }
  }
}

function element(kind, parent, properties = {}, style = "") {
  const made = Object.assign(document.createElement(kind), properties);
  made.style.cssText = style;
  parent.append(made);
  return made;
}

function render({ model, el }) {
  const { shape: [F, L, E], states: packed, words, ms, looks } = model.get("data");
  const states = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const root = element("div", el, { className: "moelab-scrubber", tabIndex: 0 },
    "width:100%;color:var(--jp-ui-font-color1,#222);font-size:14px;outline-offset:-1px");
  root.dataset.lmSuppressShortcuts = "true";    // or Jupyter would take the keys
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", "player of a text's tokens and its experts; space plays, arrow keys step");
  const bar = element("div", root, {}, "display:flex;gap:8px;align-items:center;flex-wrap:wrap");
  const button = (text, title, act) => element("button", bar,
    { textContent: text, title, onclick: act, className: "jupyter-button widget-button" }, "width:auto");
  const play = button("▶ play", "play or pause (space)", () => toggle());
  button("‹", "one back (left arrow)", () => go(now - 1));
  button("›", "one on (right arrow)", () => go(now + 1));
  const range = element("input", bar, { type: "range", min: 0, max: F - 1, step: 1 }, "flex:1;min-width:180px");
  range.setAttribute("aria-label", "forward pass");
  const speed = element("select", bar, { title: "speed" });
  SPEEDS.forEach(([text, value]) => element("option", speed, { textContent: text, value, selected: value === 5 }));
  const told = element("div", root, {}, "min-height:1.4em;margin:4px 0");
  told.setAttribute("role", "status");
  const text = element("div", root, {},
    "white-space:pre-wrap;max-height:9em;overflow:auto;font-family:monospace;line-height:1.5;margin:4px 0");
  const tokens = words.map((word, i) => element("span", text,
    { textContent: word, onclick: () => go(i) }, "cursor:pointer;border-radius:3px"));
  const canvas = element("canvas", root, { className: "moelab-player" }, "display:block;width:100%");
  canvas.setAttribute("role", "img");
  const legend = element("div", root, {}, "display:flex;gap:14px;flex-wrap:wrap;margin:4px 0");
  const samples = looks.filter((look) => look[2]).map((look) => {
    const line = element("span", legend, {}, "display:inline-flex;gap:4px;align-items:center");
    const sample = element("canvas", line, { width: 32, height: 32 }, "width:16px;height:16px");
    element("span", line, { textContent: look[0] });
    return [look, sample];
  });

  let now = -1, playing = false, last = 0, frames = 0, saving = 0, cell = 10;
  const ink = () => getComputedStyle(root).color;

  function draw() {
    const wide = root.clientWidth || 800, ratio = window.devicePixelRatio || 1;
    cell = Math.max(4, Math.min(24, (wide - LEFT - 4) / E));
    const high = TOP + L * cell + 4;
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(high * ratio)) {
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(high * ratio);
      canvas.style.height = `${high}px`;
    }
    const context = canvas.getContext("2d"), colour = ink();
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, wide, high);
    context.fillStyle = colour;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(14 / cell)), across = Math.max(1, Math.ceil(30 / cell));
    for (let l = 0; l < L; l += every) context.fillText(l ? `${l}` : "layer 0", 2, TOP + (l + 0.5) * cell);
    for (let e = 0; e < E; e += across) context.fillText(`${e}`, LEFT + e * cell, 8);
    for (let l = 0, i = now * L * E; l < L; l++)
      for (let e = 0; e < E; e++, i++)
        paint(context, looks[states[i]], LEFT + (e + 0.5) * cell, TOP + (l + 0.5) * cell, 0.4 * cell, colour);
    canvas.dataset.frames = ++frames;
  }

  function tell() {
    const counts = new Array(looks.length).fill(0);
    for (let i = now * L * E; i < (now + 1) * L * E; i++) counts[states[i]]++;
    const parts = looks.map(([what], i) => `${counts[i]} ${what}`).slice(2);
    const took = ms.length ? `, ${ms[now].toFixed(1)} ms measured` : "";
    told.textContent = `pass ${now} of ${F - 1}${took}: ${parts.join("; ")}`;
    canvas.setAttribute("aria-label", told.textContent);
  }

  function go(to) {
    to = Math.max(0, Math.min(F - 1, to));
    if (to === now) return;
    if (tokens[now]) tokens[now].style.outline = "";
    now = to;
    tokens.forEach((span, i) => (span.style.opacity = i <= now ? 1 : 0.45));
    tokens[now].style.outline = "2px solid currentColor";
    const line = tokens[now].offsetTop - text.offsetTop;
    if (now && (line < text.scrollTop || line > text.scrollTop + text.clientHeight - 20)) text.scrollTop = line - 20;
    range.value = now;
    range.setAttribute("aria-valuetext", `pass ${now}: ${words[now]}`);
    draw();
    tell();
    if (!playing) {                             // tell the kernel, if there is one, when it rests
      clearTimeout(saving);
      saving = setTimeout(() => (model.set("token", now), model.save_changes()), 150);
    }
  }

  function step(time) {
    if (!playing) return;
    const due = 1000 / Number(speed.value);
    if (!last) last = time;
    const passed = Math.floor((time - last) / due + 0.05);
    if (passed >= 1) {
      last = Math.max(last + passed * due, time - due);
      go(now + 1);
    }
    if (now >= F - 1) toggle();
    else requestAnimationFrame(step);
  }

  function toggle() {
    playing = !playing;
    play.textContent = playing ? "⏸ pause" : "▶ play";
    last = 0;
    if (playing) {
      if (now >= F - 1) go(0);
      requestAnimationFrame(step);
    } else {
      model.set("token", now);
      model.save_changes();
    }
  }

  range.oninput = () => go(Number(range.value));
  root.onkeydown = (event) => {
    if (event.target.tagName === "SELECT" || event.target.tagName === "BUTTON" && event.key === " ") return;
    const keys = { " ": () => toggle(), ArrowLeft: () => go(now - 1), ArrowRight: () => go(now + 1),
      Home: () => go(0), End: () => go(F - 1) };
    if (!keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
    event.stopPropagation();                    // Jupyter has keys of its own
  };
  canvas.onmousemove = (event) => {
    const box = canvas.getBoundingClientRect();
    const e = Math.floor((event.clientX - box.left - LEFT) / cell), l = Math.floor((event.clientY - box.top - TOP) / cell);
    canvas.title = e >= 0 && e < E && l >= 0 && l < L
      ? `layer ${l}, expert ${e}: ${looks[states[(now * L + l) * E + e]][0]}` : "";
  };
  const repaint = () => {
    samples.forEach(([look, sample]) => {
      const context = sample.getContext("2d");
      context.clearRect(0, 0, 32, 32);
      paint(context, look, 16, 16, 11, ink());
    });
    if (now >= 0) draw();
  };
  const moved = () => go(model.get("token"));
  model.on("change:token", moved);
  const size = new ResizeObserver(repaint), look = new MutationObserver(() => setTimeout(repaint, 50));
  size.observe(root);
  look.observe(document.body, { attributes: true });
  repaint();
  go(model.get("token"));
  if (model.send) {                             // for the saved notebook
    const still = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
    const context = still.getContext("2d");
    context.fillStyle = getComputedStyle(document.body).getPropertyValue("--jp-layout-color0").trim() || "white";
    context.fillRect(0, 0, still.width, still.height);
    context.drawImage(canvas, 0, 0);
    still.toBlob(async (blob) => model.send({ png: true }, undefined, [await blob.arrayBuffer()]));
  }
  return () => {
    playing = false;
    size.disconnect();
    look.disconnect();
    model.off("change:token", moved);
  };
}

export default { render };
