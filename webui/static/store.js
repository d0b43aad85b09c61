// What is kept in this browser, per user: chats in IndexedDB, drafts and settings in localStorage. The server keeps no
// conversations: there is nothing to guard, back up or expire there, and a chat is gone when it is deleted here.

import { inMemory, openDatabase } from './database.js';
import * as local from './local.js';
import { complete, merge } from './turns.js';

export const MOST_CHATS = 300, MOST_DRAFTS = 40;
export const DEFAULTS = {
  system: '', temperature: 0, length: 512, policy: '', press: '', retrieval: 'off', details: false, theme: 'system', price: 0, currency: '$',
};

let base = null, name = '', channel = null;

/** Opens what is kept for a user; nothing of another user is ever read. `changed` is called when another tab has
 * changed a chat (its id; '' for all), or was closed while it answered some of its turns (and their ids). Returns what this browser does not keep, in words; '' if it keeps everything. */
export const open = async (user, changed) => {
  name = `mpic/${user}`;
  const opened = await openDatabase(name).catch(() => null);
  base = opened || inMemory();
  try {
    channel = new BroadcastChannel(name);
    channel.onmessage = ({ data }) => changed(data.id ?? data, data.left ?? []);
  } catch { channel = null; }
  return [!opened && 'chats', !local.works() && 'drafts and settings'].filter(Boolean).join(', ');
};

export const list = async () => (await base.list()).map(complete).sort((a, b) => b.updated - a.updated);
export const load = async (id) => {
  const found = await base.load(id);
  return found && complete(found);
};

/** Keeps a chat, and brings what another tab has kept of it into `chat`; with `ifKept` a chat that was deleted meanwhile
 * stays deleted. Returns whether something came from another tab (`news`), and the chats that made way (`gone`), oldest
 * first: at most MOST_CHATS are kept. */
export const save = async (chat, { ifKept = false } = {}) => {
  let news = false, there = true;
  await base.change(chat.id, (kept) => {
    there = Boolean(kept) || !ifKept;
    if (kept) news = merge(chat, complete(kept));
    return there ? chat : null;
  });
  if (!there) return { news, gone: [] };
  channel?.postMessage(chat.id);
  if (await base.count() <= MOST_CHATS) return { news, gone: [] };
  const gone = (await list()).slice(MOST_CHATS).reverse();
  for (const old of gone) await base.remove(old.id);
  return { news, gone };
};
export const remove = async (id) => {
  await base.remove(id);
  keepDraft(id, '');
  channel?.postMessage(id);
};
/** Tells other tabs that this page is left while it answers these turns of a chat. */
export const leave = (id, turns) => channel?.postMessage({ id, left: turns });
export const clear = async () => {
  await base.clear();
  local.remove(`${name}/drafts`);
  channel?.postMessage('');
};

const read = (key) => {
  try { return JSON.parse(local.get(`${name}/${key}`)) || {}; } catch { return {}; }
};
const write = (key, value) => local.put(`${name}/${key}`, JSON.stringify(value));

/** The text in the box of a chat ('' is the new one) that was not sent. */
export const draft = (id) => read('drafts')[id || 'new'] || '';
/** Keeps a draft; returns whether it outlasts this page. */
export const keepDraft = (id, text) => {
  const { [id || 'new']: _, ...others } = read('drafts');
  const kept = Object.entries(others).slice(-(MOST_DRAFTS - 1));
  if (text) kept.push([id || 'new', text]);
  return write('drafts', Object.fromEntries(kept));
};

export const settings = { ...DEFAULTS };
export const loadSettings = () => Object.assign(settings, DEFAULTS, read('settings'));
export const keep = (changes) => {
  Object.assign(settings, changes);
  write('settings', { ...read('settings'), ...changes });  // another tab may have changed others
  if ('theme' in changes) theme();
};
/** Shows the colours that were chosen. They are kept for the browser, so that they are there before the login. */
export const theme = () => {
  if (name) local.put('mpic-theme', settings.theme);
  const chosen = name ? settings.theme : local.get('mpic-theme') || 'system';
  if (chosen === 'system') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
};
