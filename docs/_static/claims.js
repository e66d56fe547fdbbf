// The filters of the table of claims: source, verdict, words.
addEventListener("DOMContentLoaded", () => {
  const form = document.querySelector("form.claims");
  if (!form) return;
  const rows = [...document.querySelectorAll("table.claims tbody tr")];
  function filter() {
    const { source, verdict, words } = Object.fromEntries(new FormData(form));
    let shown = 0;
    for (const row of rows) {
      const fits =
        (!source || row.dataset.source === source) &&
        (!verdict || row.dataset.verdict === verdict) &&
        row.textContent.toLowerCase().includes(words.toLowerCase());
      row.hidden = !fits;
      shown += fits;
    }
    form.querySelector("output").value = `${shown} of ${rows.length} claims`;
  }
  const asked = new URLSearchParams(location.search);
  for (const name of ["source", "verdict", "words"]) if (asked.has(name)) form[name].value = asked.get(name);
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();
});
