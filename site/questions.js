// The filter above a page of questions. Without JavaScript it stays hidden, and all are shown.
const form = document.getElementById("filter");
function filter() {
  const wanted = [...form.querySelectorAll("select")].filter((one) => one.value);
  let shown = 0;
  for (const question of document.querySelectorAll(".question")) {
    question.hidden = !wanted.every((one) => question.dataset[one.name] === one.value);
    shown += !question.hidden;
  }
  form.querySelector("output").value = `${shown} questions`;
}
form.hidden = false;
form.addEventListener("change", (event) => {
  if (event.target.name !== "unfold") return filter();
  for (const answer of document.querySelectorAll(".question details")) {
    answer.open = event.target.checked;
  }
});
filter(); // a browser keeps the choice when a page is loaded again
