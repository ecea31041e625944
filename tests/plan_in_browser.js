// Fills the planner's form as a reader does, and prints what the page then shows, as JSON:
//   node plan_in_browser.js CHROMIUM ADDRESS '[{"gpus": "64"}, ...]'
// A list of [what is said, what is drawn]; the first is the page before any change. All other hosts
// are unknown to the browser.
const puppeteer = require("../slides/node_modules/puppeteer-core");

const [chromium, address, changes] = process.argv.slice(2);
const look = () => ["plan-said", "plan-out"].map(id => document.getElementById(id).innerText);
const fill = changes => {
  const form = document.querySelector(".plan form");
  for (const [name, value] of Object.entries(changes)) form.elements[name].value = value;
  document.getElementById("plan-said").textContent = "asked";
  form.onchange();
};
const isAnswered = () => !/^(asked|Fetching.*|Planning.*)$/.test(
  document.getElementById("plan-said").textContent);

(async () => {
  const browser = await puppeteer.launch({executablePath: chromium, args: ["--no-sandbox",
      "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]});
  try {
    const page = await browser.newPage();
    await page.goto(address, {waitUntil: "load"});
    const shown = [await page.evaluate(look)];
    for (const change of JSON.parse(changes)) {
      await page.evaluate(fill, change);
      await page.waitForFunction(isAnswered, {timeout: 120000});
      shown.push(await page.evaluate(look));
    }
    console.log(JSON.stringify(shown));
  } finally {
    await browser.close();
  }
})();
