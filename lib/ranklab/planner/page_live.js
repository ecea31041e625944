const LABELS = { model: "Model", config: "or a config.json of Hugging Face's",
  node: "Kind of node", gpus: "GPUs", sequence: "Tokens of a sequence", batch: "Sequences of a batch",
  tokens: "Billion tokens in all", price: "$ an hour of a GPU", network: "Network, GB/s of a GPU",
  link: "NVLink, GB/s of a GPU" }
const said = make("p", "")
said.id = "plan-said"
out.before(said)

function control(name) {
  const options = { model: data.models, node: data.nodes }[name]
  const made = make(options ? "select" : name == "config" ? "textarea" : "input", "")
  if (options) made.append(...options.map(value => new Option(value, value)))
  if (made.type == "text") Object.assign(made, { type: "number", min: 0, step: "any" })
  if (data.asked[name] === null) made.placeholder = name == "price" ? "as published" : "the node's"
  return Object.assign(made, { name, value: data.asked[name] ?? "" })
}

const asked = () => Object.fromEntries([...new FormData(form)].map(([name, value]) =>
  [name, typeof data.asked[name] == "string" ? value : value == "" ? null : Number(value)]))

function show({ refused, model, notes, row, node, tokens }) {
  said.textContent = refused ? refused + "." : [model, ...notes].join("; ") + "."
  if (refused) out.replaceChildren()
  else draw(row, node, tokens)
}

let python, waits, next
function plan() {  // one question at a time; of those that wait, the last one
  history.replaceState(null, "", "#" + new URLSearchParams(
    [...new FormData(form)].filter(([name, value]) => value && name != "config")))
  if (!data.worker || location.protocol == "file:") {
    said.textContent = "This page was built or opened without the Python that plans: `ranklab plan` "
      + "does the same; or serve the site's folder with `python -m http.server`."
    return out.replaceChildren()
  }
  if (waits) return next = true
  said.textContent = "Planning ..."
  if (!python) {
    said.textContent = "Fetching Python for your browser, once ..."
    python = new Worker(data.worker, { type: "module" })
    python.onmessage = ({ data: answer }) => {
      waits = false
      if (next) { next = false; plan() } else show(JSON.parse(answer))
    }
    python.onerror = error => show({ refused: `Python did not start: ${error.message}` })
  }
  waits = true
  python.postMessage(JSON.stringify(asked()))
}

form.append(...Object.entries(LABELS).map(([name, text]) => make("label", text, control(name))))
form.onchange = plan
form.onsubmit = event => event.preventDefault()
show(data.first)
const linked = [...new URLSearchParams(location.hash.slice(1))].filter(([name]) => name in LABELS)
for (const [name, value] of linked) form.elements[name].value = value
if (linked.length) plan()
