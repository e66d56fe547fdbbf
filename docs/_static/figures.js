// Draws the plotly figures of a page, each when it comes near the window; the library is loaded with
// the first. Dark pages invert them, see site.css.
const base = document.currentScript.src.replace(/[^/]*$/, "");
let library = null;
function plotly() {
  library ??= new Promise((done, fail) => {
    const script = document.createElement("script");
    Object.assign(script, { src: `${base}plotly.min.js`, onload: () => done(), onerror: fail });
    document.head.append(script);
  });
  return library;
}
const near = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    plotly().then(() => {
      const { data, layout } = JSON.parse(target.querySelector("script").textContent);
      target.replaceChildren();
      Plotly.newPlot(target, data, layout, { responsive: true, displaylogo: false });
      target.style.minHeight = "";
    });
  }
}, { rootMargin: "600px" });
addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".plot").forEach((plot) => near.observe(plot));
});
