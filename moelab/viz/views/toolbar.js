// The buttons of a view. The kernel makes CSV and HTML; PNG and copies need no kernel.

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {                                     // no permission, or a page without https
    const area = document.body.appendChild(document.createElement("textarea"));
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

// All pictures of a view, one below the other, and its caption.
async function picture(frame, name) {
  const Plotly = await globalThis.moelabPlotly;
  const parts = [...frame.querySelectorAll(".js-plotly-plot, canvas.moelab-player")].filter((part) => part.clientWidth);
  if (!parts.length) throw new Error("the picture is not there yet");
  const scale = 2, wide = scale * Math.max(...parts.map((part) => part.clientWidth));
  const images = await Promise.all(parts.map(async (part) => {
    if (part.tagName === "CANVAS") return part;
    const image = new Image();
    image.src = await Plotly.toImage(part,
      { format: "png", scale, width: part.clientWidth, height: part.clientHeight });
    await image.decode();
    return image;
  }));
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d"), line = 20 * scale;
  const font = `${14 * scale}px system-ui, sans-serif`, lines = [""];
  context.font = font;
  for (const word of frame.querySelector("[role=note]").textContent.split(" ")) {
    if (context.measureText(`${lines.at(-1)} ${word}`).width > wide - line) lines.push("");
    lines.push(`${lines.pop()} ${word}`);
  }
  const heights = images.map((image) => image.height * Math.min(1, wide / image.width));
  canvas.width = wide;
  canvas.height = heights.reduce((sum, height) => sum + height, line * (lines.length + 1));
  // plotly's pictures are light, whatever the page is
  const style = parts.some((part) => part.tagName !== "CANVAS") ? null : getComputedStyle(document.body);
  context.fillStyle = style?.getPropertyValue("--jp-layout-color0").trim() || "white";
  context.fillRect(0, 0, wide, canvas.height);
  let top = 0;
  images.forEach((image, i) => {
    context.drawImage(image, 0, top, image.width * Math.min(1, wide / image.width), heights[i]);
    top += heights[i];
  });
  context.fillStyle = style?.getPropertyValue("--jp-ui-font-color1").trim() || "black";
  context.font = font;
  lines.forEach((text, i) => context.fillText(text, line / 2, top + line * (i + 1)));
  return new Promise((done) => canvas.toBlob((blob) => (save(blob, name), done())));
}

function render({ model, el }) {
  const bar = document.createElement("div");
  bar.setAttribute("role", "toolbar");
  bar.setAttribute("aria-label", "save or copy this view");
  bar.style.cssText = "display:flex;flex-wrap:wrap;gap:6px;align-items:center;margin:4px 0";
  const told = document.createElement("span");
  told.setAttribute("role", "status");
  told.style.color = "var(--jp-ui-font-color1, #222)";
  let clearing = 0;
  const tell = (text) => {
    told.textContent = text;
    clearTimeout(clearing);
    clearing = setTimeout(() => (told.textContent = ""), 5000);
  };
  const button = (label, title, act) => {
    const made = document.createElement("button");
    made.className = "jupyter-button widget-button";
    made.style.width = "auto";
    made.textContent = label;
    made.title = title;
    made.onclick = async () => {
      try {
        tell((await act()) || "");
      } catch (error) {
        tell(String(error.message || error));
      }
    };
    bar.append(made);
  };
  const name = () => model.get("name");
  button("CSV", "save the numbers", () => void model.send({ file: "csv" }));
  button("PNG", "save the picture", () => picture(el.closest(".moelab-view") || document, `${name()}.png`));
  button("HTML", "save a page that works without a network", () => void model.send({ file: "html" }));
  button("copy command", "the line for a shell that gives these numbers",
    () => copy(model.get("shell")).then(() => `copied: ${model.get("shell")}`));
  bar.append(told);
  el.append(bar);

  const receive = (message, buffers) => {
    save(new Blob([buffers[0]]), message.name);
    tell(`saved ${message.name}`);
  };
  model.on("msg:custom", receive);
  const live = document.head.appendChild(document.createElement("style"));  // for the time that this is shown
  const hide = () => {
    live.textContent = model.get("still") ? `.${model.get("still")} { display: none; }` : "";
  };
  model.on("change:still", hide);
  hide();
  return () => {
    live.remove();
    model.off("change:still", hide);
    model.off("msg:custom", receive);
  };
}

export default { render };
