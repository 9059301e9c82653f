// Chooses and sorts the rows. Without it, the page shows all of them by update and prompt.
const form = document.getElementById("choose"), body = document.querySelector("tbody");
const texts = new Map([...body.rows].map(row =>
  [row, [...row.querySelectorAll(".text")].map(cell => cell.textContent.toLowerCase()).join("\n")]));
function show() {
  const {update, order, search} = form.elements, word = search.value.trim().toLowerCase();
  const [key, sign] = order.value.split(" ");
  const last = value => value === undefined ? Infinity : sign * value; // a row without the value comes last
  const rows = [...texts.keys()];
  rows.sort((a, b) => last(a.dataset[key]) - last(b.dataset[key]) || 0);
  let count = 0;
  for (const row of rows) {
    row.hidden = (update.value && row.dataset.episode !== update.value) || !texts.get(row).includes(word);
    count += !row.hidden;
  }
  body.append(...rows);
  form.querySelector("output").value = `${count} of ${rows.length} rollouts`;
}
form.addEventListener("input", show);
form.addEventListener("submit", event => event.preventDefault());
form.hidden = false;
show();
