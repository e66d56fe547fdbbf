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

function picture(frame, name) {
  const canvas = frame.querySelector("canvas.moelab-player");
  if (canvas) return canvas.toBlob((blob) => save(blob, name));
  const camera = frame.querySelector(".modebar-btn[data-title*='Download plot']");
  if (!camera) throw new Error("the picture is not there yet");
  camera.click();
}

export function isDark() {
  const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
  if (jpThemeLight) return jpThemeLight === "false";
  if (vscodeThemeKind) return vscodeThemeKind.includes("dark");
  return false;                                 // a page whose colours nobody has changed is light
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
  button("PNG", "save the picture", () => void picture(el.closest(".moelab-view") || document, `${name()}.png`));
  button("HTML", "save a page that works without a network", () => void model.send({ file: "html" }));
  button("copy command", "the line for a shell that gives these numbers",
    () => copy(model.get("shell")).then(() => `copied: ${model.get("shell")}`));
  button("copy Python", "the Python that gives this view",
    () => copy(model.get("python")).then(() => "copied"));
  bar.append(told);
  el.append(bar);

  const receive = (message, buffers) => {
    save(new Blob([buffers[0]], { type: message.type }), message.name);
    tell(`saved ${message.name}`);
  };
  model.on("msg:custom", receive);
  const look = () => {
    if (model.get("dark") !== isDark()) {
      model.set("dark", isDark());
      model.save_changes();
    }
  };
  const watch = new MutationObserver(look);
  watch.observe(document.body, { attributes: true });
  look();
  return () => {
    watch.disconnect();
    model.off("msg:custom", receive);
  };
}

export default { render };
