const names = ["model", "node", "gpus", "sequence", "batch"]
const TITLES = ["Model", "Kind of GPU", "GPUs", "Sequence", "Batch"]
const tokens = n => (n < 2 ** 20 ? number(n / 1024) + "k" : number(n / 2 ** 20) + "M") + " tokens"

function pick(values, wanted, usual) {  // the same, or about as many
  const goal = wanted > 0 || values.includes(wanted) ? wanted : usual
  const far = value => value == goal ? -1 : Math.abs(Math.log(value / goal)) || Infinity
  return values.reduce((a, b) => far(b) < far(a) ? b : a)
}

function offer(wanted) {  // fills the controls
  const node = pick(Object.keys(data.nodes), wanted.node, data.asked[1])
  const { gpus, batches } = data.nodes[node]
  const all = [Object.keys(data.models), Object.keys(data.nodes), gpus, data.sequences, batches]
  const said = [n => `${n} (${number(data.models[n] / 1e9)}B)`, n => n, n => n, tokens, tokens]
  names.forEach((name, i) => {
    const select = form.elements[name] || make("select", "")
    if (!select.name) form.append(make("label", TITLES[i], select))
    select.name = name
    select.replaceChildren(...all[i].map(value => new Option(said[i](value), value)))
    select.value = pick(all[i], wanted[name], data.asked[i])
  })
}

const linked = () => ({
  ...Object.fromEntries(names.map((name, i) => [name, String(data.asked[i])])),
  ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) })
const show = wanted => {
  offer(wanted)
  draw(data.rows[names.map(name => form.elements[name].value).join(" ")],
       data.nodes[form.elements.node.value], data.tokens)
}
form.onchange = () => {
  show(Object.fromEntries(new FormData(form)))
  history.replaceState(null, "", "#" + new URLSearchParams(new FormData(form)))
}
addEventListener("hashchange", () => show(linked()))
show(linked())
