// Open the built site in a headless Chromium and say, as JSON, what is there.
//
//   node look.mjs report URL PAGE...         what each page does: errors, requests to other hosts, widths
//   node look.mjs picture URL PAGE FILE [WIDTH] [dark] [#ID]   all of a page, or the element with this id
//   node look.mjs evaluate URL               run scripts in pages: JSON on standard input, see `evaluate`
//
// Needs: `make extra-browser`. Changes: unpacks the browser into $TMPDIR, once.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { join } from "node:path";

const require = createRequire(join(process.env.BROWSER_MODULES ?? ".", "none.cjs"));
const load = async (name) => import(pathToFileURL(require.resolve(name)).href);
const { default: chromium } = await load("@sparticuz/chromium");
const { default: puppeteer } = await load("puppeteer-core");

const PHONE = { width: 390, height: 844, deviceScaleFactor: 2, isMobile: true, hasTouch: true };
const DESK = { width: 1280, height: 900 };

chromium.setGraphicsMode = false;
// One process cannot be closed and opened again page by page, and what is insecure is not needed here.
const args = chromium.args.filter((arg) => !/single-process|web-security|insecure/.test(arg));
const browser = await puppeteer.launch({ executablePath: await chromium.executablePath(), args, headless: "shell" });

// The planner's page loads the planner, and then plans in a worker.
const planned = (page) => page.waitForFunction(() => (document.querySelector("#planner")?.dataset.state ?? "ready") === "ready", { timeout: 120000 });

async function open(url, viewport, log) {
  const page = await browser.newPage();
  await page.setViewport(viewport);
  const origin = new URL(url).origin;
  page.on("console", (message) => { if (["error", "warn"].includes(message.type())) log.errors.push(message.text()); });
  page.on("pageerror", (error) => log.errors.push(String(error)));
  page.on("request", (request) => {
    const to = request.url();
    if (!to.startsWith(origin) && !/^(data|blob|about):/.test(to)) log.foreign.push(to);
  });
  page.on("response", (response) => { if (response.status() >= 400) log.errors.push(`${response.status()} ${response.url()}`); });
  await page.goto(url, { waitUntil: "networkidle0" });
  await planned(page);
  return page;
}

// In the page: what sticks out to the right of a screen of this width, though nothing around it scrolls. A phone's own
// innerWidth would not do: it grows with the page.
function widths(width) {
  const out = [...document.querySelectorAll(".bd-article *")].filter((one) => {
    if (one.getBoundingClientRect().right <= width + 1 || !one.getClientRects().length) return false;
    for (let up = one; up; up = up.parentElement) {
      if (["auto", "scroll", "hidden"].includes(getComputedStyle(up).overflowX) && up.tagName !== "BODY") {
        return up.getBoundingClientRect().right > width + 1;
      }
    }
    return true;
  });
  return {
    beyond: document.scrollingElement.scrollWidth - width,
    sticking_out: out.slice(0, 3).map((one) => one.outerHTML.slice(0, 90)),
  };
}

async function pageReport(base, name) {
  const log = { page: name, errors: [], foreign: [] };
  let page = await open(base + name, PHONE, log);
  log.phone = await page.evaluate(widths, PHONE.width);
  await page.close();
  page = await open(base + name, DESK, log);
  log.desk = await page.evaluate(widths, DESK.width);
  Object.assign(log, await page.evaluate(() => ({
    title: document.title,
    words: document.querySelector(".bd-article")?.innerText.split(/\s+/).length ?? 0,
    small_math: [...document.querySelectorAll("math")].filter((m) => m.getBoundingClientRect().height < 5).length,
    math: document.querySelectorAll("math").length,
    broken_pictures: [...document.images].filter((i) => i.complete && !i.naturalWidth).map((i) => i.src),
    no_alt: [...document.querySelectorAll(".cell_output img")].filter((i) => !i.alt || i.alt.startsWith("..")).map((i) => i.src),
    copy_buttons: document.querySelectorAll("button.copy").length,
    notebook: document.querySelector("a[download]")?.getAttribute("href") ?? null,
    links: [...document.querySelectorAll("a[href]")].map((a) => a.href).filter((h) => h.startsWith(location.origin)),
    ids: [...document.querySelectorAll("[id]")].map((one) => one.id),
  })));
  await page.close();
  return log;
}

async function search(base, term) {
  const log = { errors: [], foreign: [] };
  const page = await open(`${base}search.html?q=${encodeURIComponent(term)}`, DESK, log);
  const finished = () => /finished/i.test(document.querySelector("#search-results")?.innerText ?? "");
  await page.waitForFunction(finished, { timeout: 30000 }).catch(() => log.errors.push("the search did not finish"));
  log.found = await page.evaluate(() => [...document.querySelectorAll("#search-results li a")].map((a) => a.getAttribute("href")));
  await page.close();
  return log;
}

async function darkMode(base, name) {
  const log = { errors: [], foreign: [] };
  const page = await open(base + name, DESK, log);
  const state = () => page.evaluate(() => {
    const picture = document.querySelector(".cell_output img");
    return { theme: document.documentElement.dataset.theme, ground: getComputedStyle(document.body).backgroundColor,
             filter: picture && getComputedStyle(picture).filter };
  });
  log.seen = {};
  for (const mode of ["light", "dark"]) {
    await page.evaluate((mode) => {
      document.querySelector(".theme-switch-button").click();
      document.querySelector(`.theme-change-button[data-mode="${mode}"]`).click();
    }, mode);
    await new Promise((done) => setTimeout(done, 300));
    log.seen[mode] = await state();
  }
  await page.close();
  return log;
}

async function widget(base) {
  const log = { errors: [], foreign: [] };
  const page = await open(`${base}planner_widget.html`, PHONE, log);
  const read = () => page.evaluate(() => document.querySelector("#planner output")?.innerText ?? null);
  log.before = await read();
  await page.evaluate(() => {
    const axis = document.querySelector('#planner [name="tensor"]');
    axis.value = String(Number(axis.value) + 1);
    axis.dispatchEvent(new Event("input", { bubbles: true }));
  });
  await planned(page);
  log.after = await read();
  await page.close();
  return log;
}

// Without a mouse: move to the next device, to a collective, and increase an axis beyond the largest mesh.
async function meshExplorer(base) {
  const log = { errors: [], foreign: [] };
  const page = await open(`${base}mesh_explorer.html?mesh=fsdp=2,tensor=4&device=0`, PHONE, log);
  const read = () => page.evaluate(() => ({
    said: document.querySelector("#mesh-explorer .said").innerText,
    device: document.querySelector("#mesh-explorer h3").innerText,
    marked: [...document.querySelectorAll("#mesh-explorer .marked")].map((one) => Number(one.innerText)),
    focus: document.activeElement.innerText,
    sizes: [...document.querySelectorAll("#mesh-explorer [data-size]")].map((one) => Number(one.innerText)),
    pictures: document.querySelectorAll("#mesh-explorer svg .held").length,
  }));
  await page.focus("#mesh-explorer .devices [aria-pressed=true]");
  for (const key of ["ArrowRight", "ArrowDown"]) await page.keyboard.press(key);
  log.moved = await read();
  await page.focus('#mesh-explorer [data-line="weights"]');
  await page.keyboard.press("Enter");
  log.line = await read();
  await page.focus('#mesh-explorer [data-array="weights w_query_DHK"]');
  await page.keyboard.press("Space");
  log.array = await read();
  await page.focus('#mesh-explorer [name="stage"]');
  await page.keyboard.press("End");
  log.full = await read();
  await page.close();
  return log;
}

// Step by step, then played from its start to its end, then a number of microbatches that interleaved does not support.
async function scheduleExplorer(base) {
  const log = { errors: [], foreign: [] };
  const page = await open(`${base}schedule_explorer.html?schedule=1f1b&other=gpipe&stages=2&microbatches=3&time=1`, PHONE, log);
  const read = () => page.evaluate(() => ({
    said: document.querySelector("#schedule-explorer .said").innerText,
    at: document.querySelector("#schedule-explorer .at").innerText,
    drawn: [...document.querySelectorAll("#schedule-explorer .drawing")].map((one) => one.querySelectorAll(".op:not(.later)").length),
    stored: [...document.querySelectorAll("#schedule-explorer .stored")].map((one) => one.textContent),
    idle: [...document.querySelectorAll("#schedule-explorer .idle")].map((one) => one.innerText),
    button: document.querySelector("#schedule-explorer [name=play]").innerText,
    microbatches: document.querySelector("#schedule-explorer [name=microbatches]").value,
  }));
  log.start = await read();
  await page.focus("#schedule-explorer [name=on]");
  await page.keyboard.press("Enter");
  log.on = await read();
  await page.focus("#schedule-explorer [name=play]");
  await page.keyboard.press("Enter");
  log.playing = await read();
  const ended = () => document.querySelector("#schedule-explorer [name=play]").innerText === "play";
  await page.waitForFunction(ended, { timeout: 30000 }).catch(() => log.errors.push("the schedule is not played to its end"));
  log.played = await read();
  await page.click("#schedule-explorer [name=lock_step]");
  log.lock_step = await read();
  await page.select("#schedule-explorer [name=schedule]", "interleaved");
  log.refused = await read();
  await page.close();
  return log;
}

// Move between bars by keyboard, then select another case, and zoom in.
async function layerTimeline(base) {
  const log = { errors: [], foreign: [] };
  const page = await open(`${base}layer_timeline.html?case=v5e_gather`, PHONE, log);
  const read = () => page.evaluate(() => ({
    said: document.querySelector("#layer-timeline .said").innerText,
    step: document.querySelector("#layer-timeline .facts .step").innerText,
    waiting: document.querySelector("#layer-timeline .facts .waiting").innerText,
    bars: document.querySelectorAll("#layer-timeline [data-bar]").length,
    red: [...document.querySelectorAll('#layer-timeline [data-way="back"] rect.waiting')].map((one) => Number(one.getAttribute("width"))).reduce((a, b) => a + b),
    width: document.querySelector('#layer-timeline [data-way="back"] svg').clientWidth,
    own: document.querySelector("#layer-timeline .own").innerText,
  }));
  log.start = await read();
  await page.focus('#layer-timeline [data-way="back"] .time');
  for (const key of ["Home", "ArrowRight", "ArrowDown"]) await page.keyboard.press(key);
  log.moved = await read();
  await page.select("#layer-timeline [name=tensor_exchange]", "ring");
  log.ring = await read();
  await page.focus("#layer-timeline [name=zoom]");
  await page.keyboard.press("ArrowRight");
  log.wider = await read();
  await page.close();
  return log;
}

async function picture(url, file, width, dark, id) {
  const log = { errors: [], foreign: [] };
  const page = await open(url, width < 600 ? { ...PHONE, width } : { ...DESK, width }, log);
  if (dark) await page.evaluate(() => { document.documentElement.dataset.theme = document.documentElement.dataset.mode = "dark"; });
  await new Promise((done) => setTimeout(done, 300));
  const shown = id ? await page.$(id) : page;
  await shown.screenshot({ path: file, ...(id ? {} : { fullPage: process.env.FULL !== "0" }) });
  return log;
}

// Run a script in a page of the site, or in a file: URL: {page, script, phone: bool, dark: bool, scripting: bool, still: bool, print: bool}. `script` is
// the body of an async function, and its result must be JSON.
async function evaluate(base, { page: name, script, phone, dark, scripting = true, still, print }) {
  const log = { errors: [], foreign: [] }, page = await browser.newPage();
  page.on("pageerror", (error) => log.errors.push(String(error)));
  await page.setViewport(phone ? PHONE : DESK);
  await page.setJavaScriptEnabled(scripting);
  if (still) await page.emulateMediaFeatures([{ name: "prefers-reduced-motion", value: "reduce" }]);
  await page.goto(name.startsWith("file:") ? name : base + name, { waitUntil: "load" });
  if (scripting) await planned(page);
  if (dark) await page.evaluate(() => { document.documentElement.dataset.theme = document.documentElement.dataset.mode = "dark"; });
  if (print) await page.pdf();
  const result = await page.evaluate(`(async () => {${script}})()`);
  await page.close();
  return { result, errors: log.errors };
}

const [what, base, ...rest] = process.argv.slice(2);
let answer;
if (what === "report") {
  answer = { pages: [] };
  for (const name of rest) answer.pages.push(await pageReport(base, name));
  answer.search = await search(base, "reduce-scatter");
  answer.dark = await darkMode(base, rest.find((name) => name.startsWith("chapters/")) ?? "index.html");
  answer.widget = await widget(base);
  answer.mesh = await meshExplorer(base);
  answer.schedule = await scheduleExplorer(base);
  answer.layer = await layerTimeline(base);
} else if (what === "evaluate") {
  answer = [];
  for (const one of JSON.parse(readFileSync(0, "utf8"))) answer.push(await evaluate(base, one));
} else {
  answer = await picture(base + rest[0], rest[1], Number(rest[2] ?? 1280), rest.includes("dark"), rest.find((one) => one.startsWith("#")));
}
console.log(JSON.stringify(answer));
await browser.close();
