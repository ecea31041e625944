const data = JSON.parse(document.getElementById("plan-data").textContent)
const form = document.querySelector(".plan form"), out = document.getElementById("plan-out")
const COLORS = { products: "#5b9bd5", attention: "#8db8e3", other: "#bcd6ef", recompute: "#a9a1e0",
  tensor: "#f0a04b", context: "#f5bd7e", expert: "#e58a6f", weights: "#f2b8a4", pipeline: "#d9a441",
  data: "#e6cb70", bubble: "#b9b9b9", optimizer: "#7fc08a", rest: "#d9d9d9", gradients: "#e6cb70",
  activations: "#8db8e3", logits: "#a9a1e0", buffers: "#d9a441", allowance: "#d9d9d9" }
const number = (n, digits = 3) => n.toLocaleString("en", { maximumSignificantDigits: digits })
const time = s => s < 1 ? number(1000 * s) + " ms" : number(s) + " s"

function make(tag, text, ...children) {
  const made = document.createElement(tag)
  made.textContent = text
  made.append(...children)
  return made
}

function bar(title, parts, values, whole, words) {
  const shown = parts.map((name, i) => [name, values[i]]).filter(([, value]) => value > whole / 1e4)
  const drawn = make("div", "", ...shown.map(([name, value]) => {
    const part = make("span", value > whole * name.length / 50 ? name : "")
    part.style.cssText = `width: ${100 * value / whole}%; background: ${COLORS[name]}`
    return part
  }))
  drawn.className = "bar"
  drawn.ariaHidden = "true"
  return [make("h2", title), drawn, make("ul", "", ...shown.map(([name, value]) => {
    const swatch = make("i", "")
    swatch.style.background = COLORS[name]
    return make("li", "", swatch, `${name} ${words(value)}`)
  }))]
}

function draw(row, node, budget) {  // row: as page.py makes it; budget: tokens of the training
  if (typeof row === "string") return out.replaceChildren(make("p", row + "."))
  const [memory, step, why, likely, [speed, days, dollars, energy], plain, layouts] = row
  const [words, seconds, gb, mfu] = layouts[0]
  const dtype = node.dtype, kernels = dtype === "bf16" ? " and FlashAttention 3 or cuDNN" : ""
  const facts = [["Layout", words], ["MFU", `${number(mfu)}% of the ${dtype} peak`], ["Why", why],
    ["Assumed", dtype + (kernels ? "" : ", attention without FlashAttention 2") + (plain
      ? `, messages hidden${kernels} where the tool can: ${time(plain)} without` : "")],
    ["Likely", `${time(likely[0])} to ${time(likely[1])}: ${likely[2]}`],
    ["Tokens a second", number(speed)],
    [number(budget / 1e9) + " billion tokens", `${number(days)} days with failures, `
      + (energy ? `${number(energy)} MWh of the GPUs, ` : "") + (dollars ? `$${number(dollars)} at `
      + `$${node.price[0]} an hour of a GPU (${node.price[1]})` : "no price is published")]]
  out.replaceChildren(
    ...bar(`Memory: ${number(gb)} of ${number(node.GB)} GB of ${node.gpu}`
           + ` (a plan may take ${number(node.room)})`, data.memory, memory, node.GB,
           bytes => number(bytes) + " GB"),
    ...bar(`Step: ${time(seconds)}`, data.step, step, seconds, time),
    make("table", "", ...facts.map(([name, text]) =>
      make("tr", "", make("th", name), make("td", text)))),
    make("table", "", make("caption", "The fastest: data x tensor x pipeline ranks"),
         make("tr", "", ...["Layout", "Step", "Memory", "MFU"].map(word => make("th", word))),
         ...layouts.map(each => make("tr", "", make("td", each[0]), make("td", time(each[1])),
                                     make("td", number(each[2]) + " GB"),
                                     make("td", number(each[3]) + "%")))))
}
