// Checks exercises in Pyodide: a message is [number, exercise, the reader's cell], and the answer is [number, what it prints].
// docs/in_exercises/programs.py writes exercises.json.
import { loadPyodide } from "./pyodide/pyodide.mjs";

async function load() {
  const file = fetch(new URL("./exercises.json", import.meta.url)).then((response) => response.json());
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href });
  const { python: modules, ...exercises } = await file;
  for (const [name, text] of Object.entries(modules)) {
    const path = `/exercises/${name}`;
    python.FS.mkdirTree(path.slice(0, path.lastIndexOf("/")));
    python.FS.writeFile(path, text);
  }
  python.runPython("import sys; sys.path.insert(0, '/exercises')");
  return python.pyimport("environment").Exercises(JSON.stringify(exercises));
}

const exercises = load();
exercises.catch((error) => postMessage(["failed", `Python could not be loaded: ${error}`]));

onmessage = async ({ data: [number, name, text] }) => {
  try {
    postMessage([number, (await exercises).check(name, text)]);
  } catch (error) {
    postMessage([number, String(error).trim().split("\n").at(-1)]);
  }
};
