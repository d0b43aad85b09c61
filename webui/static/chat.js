// The open conversation: asking, answering, comparing, editing. It is kept after every change.
import { $, h } from './dom.js';
import { announce, copy, failed, toast, undoable } from './ui.js';
import { get, stream } from './api.js';
import { away, onBack } from './connection.js';
import * as store from './store.js';
import * as library from './library.js';
import { open as openFile } from './viewer.js';
import { renderTurn, running } from './turn.js';
import { follow, followNewest, keepInView } from './scrolling.js';

const SAVE_MS = 1000;
export const chat = { current: null, perToken: null };
const listeners = [];
/** Calls a function whenever the chat has changed: title, turns, or whether it is being answered. */
export const onChange = (act) => listeners.push(act);

let abort = null, views = [], saved = 0;

const fresh = () => ({ id: '', title: '', named: false, created: Date.now(), updated: Date.now(), turns: [] });
const newRun = (policy, press = store.settings.press) => ({ policy, press, retrieval: store.settings.retrieval, text: '', state: 'waiting', error: null, usage: null, citations: [] });
export const busy = () => Boolean(abort);
const titleOf = (text) => {
  const words = text.replace(/\s+/g, ' ').trim(), plain = words.replace(/^(?:(?:IMAGE|FILE)#\S+\s+)+/, '');
  return plain.length > 60 ? `${plain.slice(0, 59)}…` : plain;
};

const changed = () => { for (const act of listeners) act(); };

/** Keeps the chat in this browser; says so when that does not work. */
export const persist = async () => {
  const { current } = chat;
  if (!current.turns.length && !current.id) return;
  current.id ||= crypto.randomUUID?.() || `${Date.now()}-${Math.random().toString(36).slice(2)}`;
  current.updated = Date.now();
  saved = current.updated;
  try {
    const gone = await store.save(current);
    for (const old of gone) toast(`This browser keeps ${store.MOST_CHATS} chats; the oldest, “${old.title}”, was removed.`, { action: ['Undo', () => store.save({ ...old, updated: Date.now() }).then(changed)] });
  } catch (error) {
    toast(`This chat could not be kept in this browser: ${error.message || error.name}. Export it if you need it.`, { bad: true });
  }
  changed();
};

// ---- showing

const viewOf = (index) => {
  const turn = chat.current.turns[index];
  const view = views[index];
  return Object.assign(view, {
    perToken: chat.perToken, open: openFile,
    toggle: () => { view.expanded = !view.expanded; store.keep({ details: view.expanded }); draw(index); if (view.expanded) follow(view.element); },
    copy: () => copy(turn.text && turn.answer.text.trim()),
    compare: () => compare(index), regenerate: () => regenerate(index), remove: () => removeTurn(index),
    edit: () => { view.editing = true; draw(index); $('textarea', view.element)?.focus(); },
    endEdit: () => { view.editing = false; draw(index); $('[data-key=more]', view.element)?.focus(); },
    resend: (text) => { if (text.trim()) resend(index, text.trim()); },
  });
};

const draw = (index) => {
  const view = views[index];
  if (!view) return;
  const focused = view.element.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  view.element.replaceChildren(...renderTurn(chat.current.turns[index], viewOf(index)).filter(Boolean));
  if (focused) $(`[data-key=${focused}]`, view.element)?.focus();
};

/** Shows all turns. */
export const drawAll = () => {
  const { turns } = chat.current, last = turns.length - 1;
  views = turns.map((turn, index) => ({ editing: false, expanded: store.settings.details && index === last, element: h('li', { class: 'turn' }) }));
  $('#said').replaceChildren(...views.map((view) => view.element));
  turns.forEach((turn, index) => draw(index));
  $('#welcome').hidden = turns.length > 0;
  changed();
};

/** Opens a chat that is kept, or a new one if `id` is empty; false if there is none. */
export const openChat = async (id) => {
  if (id && chat.current?.id === id) return true;
  const found = id ? await store.load(id) : fresh();
  if (!found) return false;
  stop();
  for (const turn of found.turns) {
    for (const run of [turn.answer, turn.again]) if (running(run)) run.state = 'stopped';  // the page was left meanwhile
  }
  chat.current = found;
  drawAll();
  followNewest();
  return true;
};

// ---- answering

const messagesOf = (upto) => {
  const { turns } = chat.current, out = store.settings.system ? [{ role: 'system', content: store.settings.system }] : [];
  for (const turn of turns.slice(0, upto)) {
    if (!turn.answer.text || turn.answer.state === 'failed') continue;
    out.push({ role: 'user', content: turn.text }, { role: 'assistant', content: turn.answer.text });
  }
  return [...out, { role: 'user', content: turns[upto].text }];
};

const bodyOf = (index, run) => {
  const { temperature, length } = store.settings;
  const mpic = { trace: true };
  if (run.policy) mpic.policy = run.policy;
  if (run.press) mpic.press = run.press;
  if (run.retrieval !== 'off') mpic.retrieval = run.retrieval;
  return { messages: messagesOf(index), stream: true, stream_options: { include_usage: true }, max_tokens: length,
    ...(temperature ? { temperature } : {}), mpic };
};

const take = (run, event) => {
  const delta = event.choices[0]?.delta;
  if (delta?.content) { run.text += delta.content; run.state = 'writing'; }
  for (const one of delta?.annotations || []) run.citations.push(one.reference_citation);
  if (event.usage) run.usage = event.usage;
};

/** Fills a run of a turn in, and shows it as it is written. */
const answer = async (index, run) => {
  const own = new AbortController(), mine = chat.current, turn = mine.turns[index];
  abort = own;
  let drawing = 0;
  const show = () => { drawing = 0; if (chat.current === mine && mine.turns[index] === turn) { draw(index); keepInView(); } };
  Object.assign(run, { text: '', state: 'waiting', error: null, usage: null, citations: [] });
  draw(index);
  follow(views[index].element);
  changed();
  try {
    for await (const event of stream(bodyOf(index, run), own.signal)) {
      take(run, event);
      drawing ||= requestAnimationFrame(show);
      if (Date.now() - saved > SAVE_MS) persist();
    }
    run.state = 'done';
  } catch (error) {
    if (error.name === 'AbortError') run.state = 'stopped';
    else if (error.code === 'unreachable' && !run.text) run.state = 'queued';
    else Object.assign(run, { state: 'failed', error: { code: error.code || 'page_error', message: error.message } });
  }
  cancelAnimationFrame(drawing);
  if (abort === own) abort = null;
  if (chat.current !== mine) {  // another chat was opened meanwhile
    await store.save(mine).catch(failed);
    return changed();
  }
  await persist();
  show();
  if (run.state === 'done') announce(`Answer: ${run.text.trim()}`);
  if (run.state === 'queued' && !away()) setTimeout(resume, 500);
  library.refresh();
  learn();
  document.dispatchEvent(new Event('mpic-answered'));
};

/** What a token costs on this server, for "times sooner". */
export const learn = async () => {
  try { chat.perToken = (await get('/v1/savings?days=1')).ms_per_token; } catch { /* the line below an answer does without */ }
};

/** Asks what the connection has swallowed again. */
const resume = () => {
  const index = chat.current?.turns.findLastIndex((turn) => turn.answer.state === 'queued' || turn.again?.state === 'queued') ?? -1;
  if (index < 0 || busy()) return;
  const turn = chat.current.turns[index];
  answer(index, turn.answer.state === 'queued' ? turn.answer : turn.again);
};
onBack(resume);

/** Asks a question. */
export const ask = async (text) => {
  if (busy()) return;
  const { current } = chat;
  current.title ||= titleOf(text);
  current.turns.push({ text, files: library.mentioned(text), answer: newRun(store.settings.policy), again: null });
  const index = current.turns.length - 1;
  const element = h('li', { class: 'turn' });
  views.push({ editing: false, expanded: store.settings.details, element });
  $('#said').append(element);
  $('#welcome').hidden = true;
  draw(index);
  await persist();
  await answer(index, current.turns[index].answer);
};

export const stop = () => {
  abort?.abort();
  abort = null;
  for (const turn of chat.current?.turns || []) {
    for (const run of [turn.answer, turn.again]) if (running(run)) run.state = 'stopped';
  }
};

/** Does something to the turns that can be taken back for ten seconds. */
const change = (text, act) => {
  const { current } = chat, before = structuredClone({ turns: current.turns, title: current.title });
  stop();
  undoable(text, {
    show: () => act(current),
    undo: async () => {
      if (chat.current === current) stop();
      Object.assign(current, before);
      if (chat.current !== current) return store.save(current).then(changed);
      drawAll();
      return persist();
    },
  });
};

const compare = (index) => {
  if (busy()) return;
  const turn = chat.current.turns[index];
  turn.again = { ...newRun('full', ''), retrieval: turn.answer.retrieval };
  answer(index, turn.again);
};

const regenerate = (index) => change('The earlier answer was replaced.', (current) => {
  const turn = current.turns[index];
  Object.assign(turn, { answer: newRun(store.settings.policy), again: null, files: library.mentioned(turn.text) });
  answer(index, turn.answer);
});

const resend = (index, text) => change('The question was replaced, and what came after it.', (current) => {
  if (!current.named && index === 0) current.title = titleOf(text);
  current.turns = [...current.turns.slice(0, index), { text, files: library.mentioned(text), answer: newRun(store.settings.policy), again: null }];
  drawAll();
  answer(index, current.turns[index].answer);
});

const removeTurn = (index) => change('The turn was deleted.', (current) => {
  current.turns.splice(index, 1);
  drawAll();
  persist();
});

