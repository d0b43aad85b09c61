// The open conversation: asking, answering, comparing, editing. It is kept after every change.
import { $, h } from './dom.js';
import { announce, copy, failed, toast, undoable } from './ui.js';
import { get, stream } from './api.js';
import { away, onBack } from './connection.js';
import * as store from './store.js';
import { mentioned, refresh as refreshFiles, withHandlesOfNow } from './files.js';
import { bodyOf, newRun, wishesOf } from './runs.js';
import { open as openFile } from './viewer.js';
import { renderTurn, running } from './turn.js';
import { merge, newTurn, putBack, takeOut, touch, turnOf } from './turns.js';
import { follow, followNewest, keepInView } from './scrolling.js';

const SAVE_MS = 1000;
export const chat = { current: null, perToken: null };
const listeners = [];
/** Calls a function whenever the chat has changed: title, turns, or whether it is being answered. */
export const onChange = (act) => listeners.push(act);

let abort = null, answering = null, saved = 0;
const unfinished = new Set();  // turns that this page answers, until the end of the answer is kept
const swallowed = new WeakSet();  // answers that this page asks for again; those of another tab are not its own
const losses = new WeakMap();  // how often the connection of an answer was lost while the server was there
const MOST_LOSSES = 3;
const views = new Map();  // of the turns that are shown, by the turn's id

const fresh = () => ({ id: '', title: '', named: false, created: Date.now(), updated: Date.now(), turns: [] });
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
    const { news, gone } = await store.save(current);
    if (news && chat.current === current) drawAll();
    sayRemoved(gone);
  } catch (error) {
    toast(`This chat could not be kept in this browser: ${error.message || error.name}. Export it if you need it.`, { bad: true });
  }
  changed();
};

/** Says which chats made way for others; what is brought back may take the place of another one. */
const sayRemoved = (gone) => {
  for (const old of gone) {
    const bringBack = () => store.save({ ...old, updated: Date.now() }).then((made) => { sayRemoved(made.gone); changed(); }).catch(failed);
    toast(`This browser keeps ${store.MOST_CHATS} chats; the oldest, “${old.title}”, was removed.`, { action: ['Undo', bringBack] });
  }
};

// ---- showing

const viewOf = (turn) => {
  const view = views.get(turn.id);
  return Object.assign(view, {
    perToken: chat.perToken, open: openFile,
    toggle: () => { view.expanded = !view.expanded; store.keep({ details: view.expanded }); draw(turn); if (view.expanded) follow(view.element); },
    copy: () => copy(turn.text && turn.answer.text.trim()),
    compare: () => compare(turn), regenerate: () => regenerate(turn), remove: () => removeTurn(turn),
    edit: () => { view.editing = true; draw(turn); $('textarea', view.element)?.focus(); },
    endEdit: () => { Object.assign(view, { editing: false, editor: null }); draw(turn); $('[data-key=more]', view.element)?.focus(); },
    resend: (text) => { if (text.trim()) resend(turn, text.trim()); },
  });
};

const draw = (turn) => {
  const view = views.get(turn.id);
  if (!view) return;
  const focused = view.element.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const [question, answer] = renderTurn(turn, viewOf(turn));
  if (view.element.firstChild === question) view.element.lastChild.replaceWith(answer);  // somebody is writing in it
  else view.element.replaceChildren(question, answer);
  if (focused && !view.element.contains(document.activeElement)) $(`[data-key=${focused}]`, view.element)?.focus();
};

/** Shows all turns. Elements that are there stay, with what is written in them. */
export const drawAll = () => {
  const { turns } = chat.current, said = $('#said'), last = turns.at(-1);
  for (const [id, view] of views) {
    if (!turnOf(chat.current, id)) { view.element.remove(); views.delete(id); }
  }
  turns.forEach((turn, i) => {
    if (!views.has(turn.id)) views.set(turn.id, { editing: false, editor: null, expanded: store.settings.details && turn === last, element: h('li', { class: 'turn' }) });
    const { element } = views.get(turn.id);
    if (said.children[i] !== element) said.insertBefore(element, said.children[i] || null);
    draw(turn);
  });
  $('#welcome').hidden = turns.length > 0;
  changed();
};

/** Brings what another tab has done to the open chat into this one. */
export const takeOver = (kept) => {
  const { current } = chat;
  if (kept.updated > current.updated) Object.assign(current, { title: kept.title, named: kept.named, updated: kept.updated });
  if (merge(current, kept)) drawAll();
  else changed();
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
  $('#said').replaceChildren();
  views.clear();
  drawAll();
  followNewest();
  return true;
};

// ---- answering

const take = (run, event) => {
  const delta = event.choices[0]?.delta;
  if (delta?.content) { run.text += delta.content; run.state = 'writing'; }
  for (const one of delta?.annotations || []) run.citations.push(one.reference_citation);
  if (event.usage) run.usage = event.usage;
};

/** Counts that a connection was lost before the answer began: what ends it each time would end it for ever. */
const lost = (run, there) => {
  losses.set(run, (losses.get(run) || 0) + (there ? 1 : 0));
  return losses.get(run);
};

/** Fills a run of a turn in, and shows it as it is written. */
const answer = async (turn, run) => {
  const own = new AbortController(), mine = chat.current, there = !away();
  abort = own;
  answering = turn;
  unfinished.add(turn);
  let drawing = 0;
  const show = () => { drawing = 0; if (chat.current === mine && mine.turns.includes(turn)) { draw(turn); keepInView(); } };
  Object.assign(run, { text: '', state: 'waiting', error: null, usage: null, citations: [] });
  touch(turn);
  draw(turn);
  follow(views.get(turn.id).element);
  changed();
  try {
    for await (const event of stream(bodyOf(mine.turns, turn, run), own.signal)) {
      if (own.signal.aborted) break;
      take(run, event);
      touch(turn);
      drawing ||= requestAnimationFrame(show);
      if (Date.now() - saved > SAVE_MS) persist();
    }
    run.state = own.signal.aborted ? 'stopped' : 'done';
  } catch (error) {
    if (error.name === 'AbortError') run.state = 'stopped';
    else if (error.code === 'unreachable' && !run.text && lost(run, there) < MOST_LOSSES) { run.state = 'queued'; swallowed.add(run); }
    else Object.assign(run, { state: 'failed', error: { code: error.code || 'page_error', message: error.message } });
  }
  cancelAnimationFrame(drawing);
  if (mine.turns.includes(turn)) touch(turn);
  if (abort === own) abort = answering = null;
  if (chat.current !== mine) {  // another chat was opened meanwhile, perhaps because this one was deleted
    await store.save(mine, { ifKept: true }).catch(failed);
    unfinished.delete(turn);
    return changed();
  }
  await persist();
  unfinished.delete(turn);
  show();
  if (run.state === 'done') announce(`Answer: ${run.text.trim()}`);
  if (!away()) setTimeout(resume, run.state === 'queued' ? 500 : 0);
  refreshFiles();
  learn();
  document.dispatchEvent(new Event('mpic-answered'));
};

/** What a token costs on this server, for "times sooner". */
export const learn = async () => {
  try { chat.perToken = (await get('/v1/savings?days=1')).ms_per_token; } catch { /* the line below an answer does without */ }
};

/** Asks what the connection has swallowed again, first the question that was asked first. */
const resume = () => {
  if (busy()) return;
  for (const turn of chat.current?.turns || []) {
    const run = [turn.answer, turn.again].find((one) => one?.state === 'queued' && swallowed.has(one));
    if (run) { answer(turn, run); return; }
  }
};
onBack(resume);

/** Asks a question. */
export const ask = async (text) => {
  if (busy()) return;
  const { current } = chat;
  current.title ||= titleOf(text);
  const turn = newTurn(current.turns, { text, files: mentioned(text), answer: newRun(store.settings.policy) });
  current.turns.push(turn);
  const element = h('li', { class: 'turn' });
  views.set(turn.id, { editing: false, editor: null, expanded: store.settings.details, element });
  $('#said').append(element);
  $('#welcome').hidden = true;
  draw(turn);
  await persist();
  if (chat.current === current) await answer(turn, turn.answer);
};

export const stop = () => {
  abort?.abort();
  abort = answering = null;
  for (const turn of chat.current?.turns || []) {
    for (const run of [turn.answer, turn.again]) if (running(run)) { run.state = 'stopped'; touch(turn); }
  }
};

/** Stops these turns: the tab that was answering them was closed, and nobody goes on. */
export const endRuns = (ids) => {
  for (const turn of chat.current.turns) {
    if (!ids.includes(turn.id) || turn === answering) continue;
    for (const run of [turn.answer, turn.again]) if (running(run)) { run.state = 'stopped'; touch(turn); }
  }
  drawAll();
  persist();
};
addEventListener('pagehide', () => {  // nothing that is kept from now on is sure to be kept
  const waits = (run) => running(run) && swallowed.has(run);
  const turns = (chat.current?.turns || []).filter((turn) => unfinished.has(turn) || waits(turn.answer) || waits(turn.again));
  if (turns.length) store.leave(chat.current.id, turns.map((turn) => turn.id));
});

/** Does something to turns that can be taken back for ten seconds. `touched` are those that it changes or takes away.
 * Undoing it puts them back among the turns that there are then, without the one that `act` returns. */
const change = (text, touched, act) => {
  stop();
  const { current } = chat, { id, title } = current, before = structuredClone(touched);
  let made = null, given = '';
  undoable(text, {
    show: () => { made = act(current); given = current.title; },
    undo: async () => {
      const kept = chat.current.id === id ? null : await store.load(id);
      const open = chat.current.id === id, now = open ? chat.current : kept;
      if (!now) return;  // the chat was deleted
      if (open && [made, ...before].some((turn) => turn && turn.id === answering?.id)) stop();
      if (made) takeOut(now, [made]);
      putBack(now, before);
      if (now.title === given) now.title = title;
      if (!open) {
        now.updated = Date.now();  // of two titles, other tabs take the later one
        await store.save(now).catch(failed);
        if (chat.current.id === id && merge(chat.current, now)) drawAll();  // it was opened meanwhile
        changed();
        return;
      }
      drawAll();
      await persist();
    },
  });
};

const compare = (turn) => {
  if (busy()) return;
  turn.again = { ...newRun('full'), ...wishesOf(turn.answer) };
  answer(turn, turn.again);
};

const regenerate = (turn) => change('The earlier answer was replaced.', [turn], () => {
  const text = withHandlesOfNow(turn, true);
  Object.assign(turn, { text, answer: newRun(store.settings.policy), again: null, files: mentioned(text) });
  answer(turn, turn.answer);
});

const resend = (turn, text) => {
  const { turns } = chat.current, index = turns.indexOf(turn), replaced = turns.slice(index);
  change('The question was replaced, and what came after it.', replaced, (current) => {
    if (!current.named && index === 0) current.title = titleOf(text);
    const made = newTurn(turns, { text, files: mentioned(text), answer: newRun(store.settings.policy) });
    takeOut(current, replaced);
    current.turns.push(made);
    drawAll();
    answer(made, made.answer);
    return made;
  });
};

const removeTurn = (turn) => change('The turn was deleted.', [turn], (current) => {
  takeOut(current, [turn]);
  drawAll();
  persist();
});
