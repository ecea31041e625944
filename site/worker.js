// Python for the planner's page (planner/live.py), beside the page, so that it stays alive meanwhile.
import { loadPyodide } from "./pyodide.mjs"

const ready = (async () => {
  const [python, library] = await Promise.all([
    loadPyodide(), fetch(new URL("ranklab.zip", import.meta.url))])
  if (!library.ok) throw new Error(`${library.url}: ${library.status} ${library.statusText}`)
  python.unpackArchive(await library.arrayBuffer(), "zip")
  return python.runPython("from ranklab.planner.live import answer; answer")
})()

onmessage = async ({ data }) => postMessage((await ready)(data))
ready.catch(error => setTimeout(() => { throw error }))  // the page hears of it as the worker's error
