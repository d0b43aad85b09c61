// What is kept in this browser, per user: chats in IndexedDB, drafts and settings in localStorage. The server keeps no
// conversations: there is nothing to guard, back up or expire there, and a chat is gone when it is deleted here.

export const MOST_CHATS = 300, MOST_DRAFTS = 40, DRAFT_CHARS = 50_000;
export const DEFAULTS = {
  system: '', temperature: 0, length: 512, policy: '', press: '', retrieval: 'off', details: false, theme: 'system', price: 0, currency: '$',
};

let base = null, name = '', channel = null;
const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** Opens what is kept for a user; nothing of another user is ever read. `changed` is called when another tab has
 * changed a chat. */
export const open = async (user, changed) => {
  name = `mpic/${user}`;
  const request = indexedDB.open(name, 1);
  request.onupgradeneeded = () => request.result.createObjectStore('chats', { keyPath: 'id' });
  base = await done(request);
  channel = new BroadcastChannel(name);
  channel.onmessage = (event) => changed(event.data);
};
const chats = (mode = 'readonly') => base.transaction('chats', mode).objectStore('chats');

export const list = async () =>
  (await done(chats().getAll())).sort((a, b) => b.updated - a.updated);
export const load = (id) => done(chats().get(id));

/** Keeps a chat. Returns the chats that made way, oldest first: at most MOST_CHATS are kept. */
export const save = async (chat) => {
  const kept = structuredClone(chat);
  await done(chats('readwrite').put(kept));
  channel.postMessage(chat.id);
  if (await done(chats().count()) <= MOST_CHATS) return [];
  const gone = (await list()).slice(MOST_CHATS).reverse();
  for (const old of gone) await done(chats('readwrite').delete(old.id));
  return gone;
};
export const remove = async (id) => {
  await done(chats('readwrite').delete(id));
  channel.postMessage(id);
};
export const clear = async () => {
  await done(chats('readwrite').clear());
  localStorage.removeItem(`${name}/drafts`);
  channel.postMessage('');
};

const read = (key) => {
  try { return JSON.parse(localStorage.getItem(`${name}/${key}`)) || {}; } catch { return {}; }
};
const write = (key, value) => {
  try { localStorage.setItem(`${name}/${key}`, JSON.stringify(value)); return true; } catch { return false; }
};

/** The text in the box of a chat ('' is the new one) that was not sent. */
export const draft = (id) => read('drafts')[id || 'new'] || '';
export const keepDraft = (id, text) => {
  const { [id || 'new']: _, ...others } = read('drafts');
  const kept = Object.entries(others).slice(-(MOST_DRAFTS - 1));
  if (text) kept.push([id || 'new', text.slice(0, DRAFT_CHARS)]);
  return write('drafts', Object.fromEntries(kept));
};

export const settings = { ...DEFAULTS };
export const loadSettings = () => Object.assign(settings, DEFAULTS, read('settings'));
export const keep = (changes) => {
  Object.assign(settings, changes);
  write('settings', settings);
  if ('theme' in changes) theme();
};
/** Shows the colours that were chosen. They are kept for the browser, so that they are there before the login. */
export const theme = () => {
  if (name) localStorage.setItem('mpic-theme', settings.theme);
  const chosen = name ? settings.theme : localStorage.getItem('mpic-theme') || 'system';
  if (chosen === 'system') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
};
