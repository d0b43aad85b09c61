// Where chats are kept: IndexedDB, or this page's memory where the browser does not let it have a database. Both can
// list, load, count, change, remove and clear.

const settled = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** Opens the database of this name. Fails where the browser allows none. */
export const openDatabase = async (name) => {
  const request = indexedDB.open(name, 1);
  request.onupgradeneeded = () => request.result.createObjectStore('chats', { keyPath: 'id' });
  const base = await settled(request);
  const read = (act) => settled(act(base.transaction('chats').objectStore('chats')));
  // a change is kept when its transaction is complete, not when its request is
  const write = (act) => new Promise((resolve, reject) => {
    const transaction = base.transaction('chats', 'readwrite');
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error || new Error('The browser has taken it back.'));
    act(transaction.objectStore('chats'));
  });
  return {
    list: () => read((chats) => chats.getAll()),
    load: (id) => read((chats) => chats.get(id)),
    count: () => read((chats) => chats.count()),
    /** Keeps what `make` makes of the chat that is kept (undefined if none is); nothing changes if it makes nothing. */
    change: (id, make) => write((chats) => {
      chats.get(id).onsuccess = (event) => {
        const made = make(event.target.result);
        if (made) chats.put(made);
      };
    }),
    remove: (id) => write((chats) => chats.delete(id)),
    clear: () => write((chats) => chats.clear()),
  };
};

export const inMemory = () => {
  const all = new Map();
  return {
    list: async () => structuredClone([...all.values()]),
    load: async (id) => structuredClone(all.get(id)),
    count: async () => all.size,
    change: async (id, make) => {
      const made = make(structuredClone(all.get(id)));
      if (made) all.set(id, structuredClone(made));
    },
    remove: async (id) => { all.delete(id); },
    clear: async () => all.clear(),
  };
};
