// Conversations in the browser's IndexedDB; in memory only, where the browser forbids it.

const memory = new Map();
let opening = null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("quire", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("conversations", {keyPath: "id"});
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  }).catch(() => null);
  return opening;
}

// Run one request on the store; without a database, the same on the map.
async function run(mode, onStore, onMap) {
  const db = await database();
  if (!db) return onMap();
  return new Promise((resolve, reject) => {
    const transaction = db.transaction("conversations", mode), request = onStore(transaction.objectStore("conversations"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error ?? new Error("the browser stored nothing"));
  });
}

export const isKept = async () => await database() !== null;
export const save = conversation => run("readwrite", store => store.put(conversation), () => { memory.set(conversation.id, structuredClone(conversation)); });
export const load = id => run("readonly", store => store.get(id), () => memory.get(id));
export const loadAll = () => run("readonly", store => store.getAll(), () => [...memory.values()]);
export const remove = id => run("readwrite", store => store.delete(id), () => { memory.delete(id); });
export const removeAll = () => run("readwrite", store => store.clear(), () => { memory.clear(); });
