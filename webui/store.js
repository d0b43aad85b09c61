// Keeps chats in this browser, each under its user and id in localStorage, and lists them. It runs in an HTML component
// of Gradio's, whose property `page` is an `OpenChat` in Python; see webui/chats.py. Events send this script's version
// of the chat (`mpicPage`), not that in Gradio's state.
const MOST = 100, SOON = 400;
let user = null, cost = null, saving = 0, asked = null;
let shown = null, answering = false;  // the open chat, and whether this tab is answering in it
const prefix = () => `mpic-chat:${user}:`;
const openKey = () => `mpic-open:${user}`;
const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (n) => n.toString(16).padStart(2, '0')).join('');
const fresh = () => ({ id: newId(), title: '', updated: 0, turns: [], removed: {} });
const read = (key) => { try { return JSON.parse(localStorage.getItem(key)); } catch { return null; } };
const load = (id) => read(prefix() + id);
const all = () => {
  const keys = Array.from({ length: localStorage.length }, (_, i) => localStorage.key(i)).filter((key) => key.startsWith(prefix()));
  return keys.map(read).filter((chat) => chat?.id).sort((a, b) => b.updated - a.updated);
};
const say = (text) => { element.querySelector('.mpic-said').textContent = text; };

/** Merges another tab's copy of a chat: the later version of each turn wins. Returns whether that changed the chat. */
const merge = (chat, kept) => {
  const removed = { ...kept.removed };
  for (const [id, when] of Object.entries(chat.removed)) removed[id] = Math.max(when, removed[id] ?? 0);
  const latest = new Map(chat.turns.map((turn) => [turn.id, turn]));
  for (const turn of kept.turns) if (!latest.has(turn.id) || latest.get(turn.id).changed < turn.changed) latest.set(turn.id, turn);
  const turns = [...latest.values()].filter((turn) => !(removed[turn.id] >= turn.changed)).sort((a, b) => a.at - b.at);
  const news = turns.length !== chat.turns.length || turns.some((turn, i) => turn !== chat.turns[i]);
  Object.assign(chat, { turns, removed });
  return news;
};

/** Returns a value that differs between versions of a chat. */
const version = (chat) => JSON.stringify([chat.id, chat.turns.map((turn) => [turn.id, turn.changed])]);
const runs = (chat) => chat.turns.flatMap((turn) => [turn.answer, turn.again]).filter((run) => ['waiting', 'writing'].includes(run?.state));
/** Marks unfinished answers of a chat as stopped, since the page may have been left. A tab that still answers updates it. */
const atRest = (chat) => { for (const run of runs(chat)) run.state = 'stopped'; return chat; };
const write = (chat) => {
  for (;;) {
    try { return localStorage.setItem(prefix() + chat.id, JSON.stringify(chat)); } catch (error) {
      const oldest = all().filter((one) => one.id !== chat.id).at(-1);
      if (!oldest) return say(`This chat could not be kept in this browser: ${error.name}. Export it if you need it.`);
      localStorage.removeItem(prefix() + oldest.id);
      say(`This browser is full; the oldest chat, “${oldest.title}”, was removed.`);
    }
  }
};

const draw = () => { if (!answering) trigger('opened'); };  // what is being answered is drawn with its next words
const saveSoon = () => { saving ||= setTimeout(save, SOON); };
const save = () => {
  clearTimeout(saving);
  saving = 0;
  const chat = shown;
  if (!chat.turns.length && !Object.keys(chat.removed).length) return;
  const kept = load(chat.id);
  const news = kept && merge(chat, kept);
  chat.updated = Date.now();
  write(chat);
  localStorage.setItem(openKey(), chat.id);
  for (const old of all().slice(MOST)) {
    localStorage.removeItem(prefix() + old.id);
    say(`This browser keeps ${MOST} chats; the oldest, “${old.title}”, was removed.`);
  }
  show();
  if (news) draw();
};

const setAnswering = (now) => { answering = now; document.body.toggleAttribute('data-answering', now); };

const open = (chat) => {
  if (answering) {
    trigger('stopped', { chat: shown.id });
    setAnswering(false);
  }
  if (saving) save();  // what the chat before this one is still to keep
  shown = chat;
  localStorage.setItem(openKey(), chat.id);
  show();
  draw();
};

/** Takes a chat that Python has sent, and has it redrawn if it differs from the chat here. */
const came = ({ chat, answering: now, asked: turn }) => {
  const drawn = version(chat);
  if (turn && turn !== asked) { asked = turn; trigger('taken'); }
  if (chat.id === shown.id) {
    const before = version(shown);
    if (now !== null) setAnswering(now);
    merge(chat, shown);  // another tab may have changed it meanwhile
    shown = Object.assign(chat, { title: shown.title || chat.title });
    if (now !== null || version(shown) !== before) saveSoon();
  } else if (now !== null) {  // the last words of an answer whose chat was left
    const kept = load(chat.id);
    if (kept) { merge(chat, kept); write(atRest(chat)); }  // not if it was deleted
  }
  if (version(shown) !== drawn) draw();
};

/** An event was lost on its way; mark the answer that it was writing as ended. */
const failed = () => {
  if (!answering) return;
  setAnswering(false);
  for (const run of runs(shown)) run.state = 'stopped';
  for (const turn of shown.turns) turn.changed += 1;
  save();
  draw();
};

const leave = () => { clearTimeout(saving); saving = 0; };
const download = (name, text, type) => {
  const link = Object.assign(document.createElement('a'), { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};
const asMarkdown = (chat) => `# ${chat.title}\n\n${chat.turns.map((turn) => `**You:** ${turn.question}\n\n${turn.answer.text}\n`).join('\n')}`;
const fileName = (chat) => chat.title.replace(/[^\w-]+/g, '-').slice(0, 60) || 'chat';

const actions = {
  new: () => open(fresh()),
  open: (id) => { const chat = id !== shown.id && load(id); if (chat) open(atRest(chat)); },
  rename: (id) => {
    const chat = load(id), title = prompt('Title of the chat', chat.title);
    if (!title) return;
    Object.assign(chat, { title: title.slice(0, 200), updated: Date.now() });
    write(chat);
    if (shown.id === id) shown.title = chat.title;
    show();
  },
  export: (id) => { const chat = load(id); download(`${fileName(chat)}.md`, asMarkdown(chat), 'text/markdown'); },
  delete: (id) => {
    if (!confirm(`Delete the chat “${load(id).title}”?`)) return;
    localStorage.removeItem(prefix() + id);
    if (shown.id === id) { leave(); open(fresh()); } else show();
  },
  exportAll: () => download('chats.json', JSON.stringify(all(), null, 1), 'application/json'),
  deleteAll: () => {
    if (!confirm('Delete all chats that this browser keeps for you? Export them first if you may need them.')) return;
    for (const chat of all()) localStorage.removeItem(prefix() + chat.id);
    leave();
    open(fresh());
  },
};

const button = (text, label, act, id) => {
  const made = Object.assign(document.createElement('button'), { type: 'button', className: 'mpic-button', textContent: text });
  if (label) Object.assign(made, { title: label }).setAttribute('aria-label', label);
  Object.assign(made.dataset, { act, id: id || '' });
  return made;
};
const show = () => {
  const list = element.querySelector('.mpic-chats'), now = shown?.id, focused = document.activeElement?.dataset;
  const { act, id } = list.contains(document.activeElement) ? focused : {};
  list.replaceChildren(...all().map((chat) => {
    const item = document.createElement('li'), title = button(chat.title || 'Chat', '', 'open', chat.id);
    if (chat.id === now) title.setAttribute('aria-current', 'true');
    item.append(title, ...[['✎', 'Rename', 'rename'], ['⤓', 'Export', 'export'], ['✕', 'Delete', 'delete']]
      .map(([sign, what, does]) => button(sign, `${what} ${chat.title}`, does, chat.id)));
    return item;
  }));
  if (act) list.querySelector(`[data-act="${act}"][data-id="${CSS.escape(id)}"]`)?.focus();
};

element.addEventListener('click', (event) => {
  const { act, id } = event.target.closest('[data-act]')?.dataset || {};
  if (act && user !== null) { say(''); actions[act](id); }
});
document.addEventListener('mpic-store', (event) => actions[event.detail.do]?.(event.detail.id));
document.addEventListener('mpic-chat', (event) => trigger('submit', event.detail));
document.addEventListener('mpic-failed', failed);
addEventListener('storage', (event) => {  // another tab has changed something
  if (user === null || !event.key?.startsWith(prefix())) return;
  show();
  const kept = load(shown.id);
  if (!kept) return;
  if (merge(shown, kept)) draw();
  if (version(shown) !== version(kept)) saveSoon();  // it has written over what this tab had kept
});
addEventListener('pagehide', () => { if (saving) save(); });
window.mpicPage = () => ({ user, ms_per_token: cost, chat: shown });
watch('page', () => {
  if (!props.page?.chat) return;
  const page = JSON.parse(JSON.stringify(props.page));  // Gradio changes its own in place
  if (user !== null && user === page.user) return came(page);
  ({ user, ms_per_token: cost } = page);  // the page has just been loaded
  dispatchEvent(new CustomEvent('mpic-user', { detail: user }));
  open(atRest(load(localStorage.getItem(openKey())) || fresh()));
});
