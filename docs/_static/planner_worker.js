// Runs the planner (docs/in_page/page.py) in Pyodide, so that the page stays responsive: a message is [number, question],
// and the answer is [number, answer]. docs/in_browser.py collects the files.
import { loadPyodide } from "./pyodide/pyodide.mjs";

async function load() {
  const archive = fetch(new URL("./planner.tar.gz", import.meta.url)).then((response) => response.arrayBuffer());
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href });
  python.FS.mkdirTree("/planner");
  python.FS.chdir("/planner");
  python.unpackArchive(await archive, "gztar", { extractDir: "/planner" });
  python.runPython("import sys; sys.path.insert(0, '/planner')");
  return python.pyimport("page");
}

const page = load();
page.catch((error) => postMessage(["failed", String(error)]));

onmessage = async ({ data: [number, question] }) => {
  try {
    postMessage([number, JSON.parse((await page).answer(JSON.stringify(question)))]);
  } catch (error) {
    postMessage([number, { error: String(error).trim().split("\n").at(-1) }]);
  }
};
