// Runs the page's script in a document that has just enough of one, against a real server: node page.mjs URL KEY
import vm from "node:vm";

const [base, key] = process.argv.slice(2);
const html = await (await fetch(base + "/")).text();
const script = html.match(/<script[^>]*>([\s\S]*)<\/script>/)[1];

class Node {}
class Element extends Node {
  children = []; cells = []; style = {}; className = ""; textContent = ""; value = "";
  scrollTop = 0; scrollHeight = 0; clientWidth = 400; height = 100; drawn = 0;
  classList = {add: name => { this.className += " " + name; }};
  append(...more) { this.children.push(...more); }
  replaceChildren(...more) { this.children = more; }
  insertRow() { const row = new Element(); this.children.push(row); return row; }
  insertCell() { const cell = new Element(); this.cells.push(cell); return cell; }
  getContext() { return {clearRect: () => { this.drawn = 0; }, fillRect: () => { this.drawn += 1; }}; }
}

const ids = {};
let stopped = false;
vm.runInNewContext(script, {
  Node, TextDecoderStream, AbortController, performance,
  document: {
    visibilityState: "visible",
    getElementById: id => ids[id] ??= new Element(),
    createElement: () => new Element(),
  },
  sessionStorage: {getItem: () => key, setItem: () => {}},
  fetch: (path, options) => fetch(base + "/" + path, options),
  setTimeout: (call, delay) => { if (!stopped) setTimeout(call, delay); },
});

const until = async condition => {
  for (let i = 0; i < 200 && !condition(); i++) await new Promise(done => setTimeout(done, 50));
};
await until(() => ids.name?.textContent && ids.blocks?.drawn);
ids.words.value = "Hi";
await ids.ask.onsubmit({preventDefault: () => {}});
const steps = () => ids.tiles?.children.find(tile => tile.children[1] === "steps")?.children[0].textContent;
await until(() => steps() > 0);
stopped = true;
console.log(JSON.stringify({
  name: ids.name.textContent,
  said: ids.talk.children.map(box => [box.className, box.textContent]),
  cells: ids.blocks.drawn,
  steps: steps(),
}));
process.exit(0);
