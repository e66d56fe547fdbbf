// The player of what was computed before, so that nothing here asks the kernel: the buttons, slider and keys of every page
// that plays, and the token scrubber.

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

// Words beside the pointer: of(event) gives them, or nothing, for where it is over a target.
function pointing(target, parent, of) {
  const tip = element("div", parent, { className: "moelab-tip" }, "position:fixed;z-index:9;max-width:20em;"
    + "padding:2px 8px;pointer-events:none;white-space:pre-wrap;font:13px/1.4 system-ui,sans-serif;"
    + "color:#fff;background:#222;border:1px solid #fff;border-radius:3px");
  tip.hidden = true;
  target.onpointermove = target.onpointerdown = (event) => {
    tip.textContent = of(event) || "";
    tip.hidden = !tip.textContent;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - 8 - tip.offsetHeight)}px`;
    tip.style.left = `${Math.max(0, Math.min(event.clientX + 12, document.documentElement.clientWidth - 8 - tip.offsetWidth))}px`;
  };
  target.onpointerleave = () => (tip.hidden = true);
}

// Play, step, a slider, speeds and keys over `count` places; `show(place)` draws one, `rested(place)` is told where it stays.
// root : what has the buttons. keys : what hears the keys. name : of the slider. rate : places a second, at first.
function transport(root, keys, count, name, rate, show, rested = () => {}) {
  let now = -1, playing = false, last = 0, resting = 0;
  const bar = element("div", root, {}, "display:flex;gap:8px;align-items:center;flex-wrap:wrap");
  const button = (text, title, onclick) => element("button", bar,
    { textContent: text, title, onclick, className: "jupyter-button widget-button" }, "width:auto");
  const play = button("▶ play", "play or pause (space)", () => toggle());
  button("‹", "one back (left arrow)", () => go(now - 1));
  button("›", "one on (right arrow)", () => go(now + 1));
  const range = element("input", bar, { type: "range", min: 0, max: count - 1, step: 1 }, "flex:1;min-width:150px");
  range.setAttribute("aria-label", name);
  const speed = element("select", bar, { title: "speed" });
  SPEEDS.forEach(([text, value]) => element("option", speed, { textContent: text, value, selected: value === rate }));

  function go(to) {
    to = Math.max(0, Math.min(count - 1, to));
    if (to === now) return;
    range.value = now = to;
    range.setAttribute("aria-valuetext", show(now));
    clearTimeout(resting);
    if (!playing) resting = setTimeout(() => rested(now), 150);
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
    if (now >= count - 1) toggle();
    else requestAnimationFrame(step);
  }

  function toggle() {
    playing = !playing;
    play.textContent = playing ? "⏸ pause" : "▶ play";
    last = 0;
    if (!playing) return rested(now);
    if (now >= count - 1) go(0);
    requestAnimationFrame(step);
  }

  range.oninput = () => go(Number(range.value));
  const pressed = (event) => {
    const { tagName, type } = event.target;
    if (tagName === "SELECT" || tagName === "SUMMARY" || tagName === "BUTTON" && event.key === " "
      || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = { " ": () => toggle(), ArrowLeft: () => go(now - 1), ArrowRight: () => go(now + 1),
      Home: () => go(0), End: () => go(count - 1) }[event.key];
    if (!act) return;
    act();
    event.preventDefault();
    event.stopPropagation();                    // Jupyter has keys of its own
  };
  keys.addEventListener("keydown", pressed);
  const end = () => {
    playing = false;
    clearTimeout(resting);
    keys.removeEventListener("keydown", pressed);
  };
  return { go, bar, end, now: () => now };
}

// The states of all passes: each begins with what the one before has left in memory, and only what differs is told.
function unfolded({ shape: [F, L, E], gaps, changes }) {
  const states = new Uint8Array(F * L * E), one = L * E;
  let at = -1, next = 0;
  const place = () => (at = next < gaps.length ? at + gaps[next] : Infinity);
  place();
  for (let i = 0; i < states.length; i++) {
    if (i >= one) states[i] = Math.min(states[i - one], 1);
    if (i === at) {
      states[i] = Number(changes[next++]);
      place();
    }
  }
  return states;
}

function render({ model, el }) {
  const data = model.get("data"), { shape: [F, L, E], words, ms, looks } = data, states = unfolded(data);
  const root = element("div", el, { className: "moelab-scrubber", tabIndex: 0 },
    "width:100%;color:var(--jp-ui-font-color1,#222);font-size:14px;outline-offset:-1px");
  root.dataset.lmSuppressShortcuts = "true";    // or Jupyter would take the keys
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", "player of a text's tokens and its experts; space plays, arrow keys step");
  const player = transport(root, model.send ? root : document, F, "forward pass", 5, show, (place) => {
    model.set("token", place);                  // the kernel, if there is one, hears where it rests
    model.save_changes();
  });
  const told = element("div", root, {}, "min-height:1.4em;margin:4px 0");
  told.setAttribute("role", "status");
  const text = element("div", root, {},
    "white-space:pre-wrap;max-height:9em;overflow:auto;font-family:monospace;line-height:1.5;margin:4px 0");
  const tokens = words.map((word, i) => element("span", text,
    { textContent: word, onclick: () => player.go(i) }, "cursor:pointer;border-radius:3px"));
  const frame = element("div", root, {}, "overflow-x:auto");
  const canvas = element("canvas", frame, { className: "moelab-player" }, "display:block");
  canvas.setAttribute("role", "img");
  const legend = element("div", root, {}, "display:flex;gap:14px;flex-wrap:wrap;margin:4px 0");
  const samples = looks.filter((look) => look[2]).map((look) => {
    const line = element("span", legend, {}, "display:inline-flex;gap:4px;align-items:center");
    const sample = element("canvas", line, { width: 32, height: 32 }, "width:16px;height:16px");
    element("span", line, { textContent: look[0] });
    return [look, sample];
  });

  let now = -1, frames = 0, cell = 10;
  const ink = () => getComputedStyle(root).color;

  function draw() {
    const room = root.clientWidth || 800, ratio = window.devicePixelRatio || 1;
    cell = Math.max(4, Math.min(24, (room - LEFT - 4) / E));
    const wide = Math.max(room, LEFT + E * cell + 4);
    const high = TOP + L * cell + 4;
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(high * ratio)) {
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(high * ratio);
      Object.assign(canvas.style, { width: `${wide}px`, height: `${high}px` });
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

  function show(to) {
    if (tokens[now]) tokens[now].style.outline = "";
    now = to;
    tokens.forEach((span, i) => (span.style.opacity = i <= now ? 1 : 0.45));
    tokens[now].style.outline = "2px solid currentColor";
    const line = tokens[now].offsetTop - text.offsetTop;
    if (now && (line < text.scrollTop || line > text.scrollTop + text.clientHeight - 20)) text.scrollTop = line - 20;
    draw();
    tell();
    return `pass ${now}: ${words[now]}`;
  }

  pointing(canvas, root, (event) => {
    const box = canvas.getBoundingClientRect();
    const e = Math.floor((event.clientX - box.left - LEFT) / cell), l = Math.floor((event.clientY - box.top - TOP) / cell);
    return e >= 0 && e < E && l >= 0 && l < L && `layer ${l}, expert ${e}: ${looks[states[(now * L + l) * E + e]][0]}`;
  });
  const repaint = () => {
    samples.forEach(([look, sample]) => {
      const context = sample.getContext("2d");
      context.clearRect(0, 0, 32, 32);
      paint(context, look, 16, 16, 11, ink());
    });
    if (now >= 0) draw();
  };
  const moved = () => player.go(model.get("token"));
  model.on("change:token", moved);
  const size = new ResizeObserver(repaint), look = new MutationObserver(() => setTimeout(repaint, 50));
  size.observe(root);
  look.observe(document.body, { attributes: true });
  repaint();
  player.go(model.get("token"));
  if (model.send) {                             // for the saved notebook
    const still = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
    const context = still.getContext("2d");
    context.fillStyle = getComputedStyle(document.body).getPropertyValue("--jp-layout-color0").trim() || "white";
    context.fillRect(0, 0, still.width, still.height);
    context.drawImage(canvas, 0, 0);
    still.toBlob(async (blob) => model.send({ png: true }, undefined, [await blob.arrayBuffer()]));
  }
  return () => {
    player.end();
    size.disconnect();
    look.disconnect();
    model.off("change:token", moved);
  };
}

export default { render };
