// Prints what chromium lays out badly in a deck's page:
//   node measure.js CHROMIUM ADDRESS SLACK LOW
// A list of {slide, over, images, low}: how far something reaches past the slide's own edge,
// pictures that are missing, and the heights of figures that are too small for a room.
const puppeteer = require("puppeteer-core");

const [chromium, address, slack, low] = process.argv.slice(2);
const FRAMES = 10; // Marp shrinks wide code in the first that is drawn: so frames are waited for

// These two run in the page.
const drawn = frames => new Promise(done => {
  const next = left => left ? requestAnimationFrame(() => next(left - 1)) : done();
  next(frames);
});

const look = (slack, lowest) => {
  const past = (slide, node) => {
    const outer = slide.getBoundingClientRect(), inner = node.getBoundingClientRect();
    const scale = slide.offsetWidth / outer.width;
    const over = {right: inner.right - outer.right, bottom: inner.bottom - outer.bottom};
    const [side, size] = over.right > over.bottom ? ["right", over.right] : ["bottom", over.bottom];
    return [side, Math.round(size * scale), (node.innerText || node.tagName).slice(0, 40)];
  };
  const worst = slide => [...slide.querySelectorAll("*")]
      .filter(node => node.tagName == "svg" || !slide.contains(node.closest("svg")))
      .map(node => past(slide, node)).sort((a, b) => b[1] - a[1])[0];
  const broken = slide => [...slide.querySelectorAll("img")].filter(image => !image.naturalWidth)
      .map(image => image.getAttribute("src"));
  // A figure is as high as its box, or as its width allows.
  const shown = image => Math.round(Math.min(
      image.offsetHeight, image.offsetWidth * image.naturalHeight / image.naturalWidth));
  const low = slide => [...slide.querySelectorAll(":scope > p > img")].map(shown)
      .filter(height => height < lowest);
  return [...document.querySelectorAll("section")].map((slide, i) => (
      {slide: i + 1, over: worst(slide), images: broken(slide), low: low(slide)}))
    .filter(one => one.images.length || one.low.length || one.over && one.over[1] > slack);
};

(async () => {
  const browser = await puppeteer.launch({
    executablePath: chromium, timeout: 150_000, protocolTimeout: 150_000,
    args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
    defaultViewport: {width: 1280, height: 720}});
  try {
    const page = await browser.newPage();
    await page.goto(address, {waitUntil: "load", timeout: 150_000});
    await page.evaluate(drawn, FRAMES);
    console.log(JSON.stringify(await page.evaluate(look, Number(slack), Number(low))));
  } finally {
    await browser.close();
  }
})();
