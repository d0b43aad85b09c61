// One turn of a conversation as elements: the question, the answer, one line below it, and on request the strip.
import { HANDLE, button, composing, fold, h, handleIn, iconButton, ms, picture } from './dom.js';
import { menu } from './ui.js';
import { markdown } from './markdown.js';
import { marked } from './diff.js';
import { saved, strip, waterfall } from './trace.js';

export const running = (run) => Boolean(run) && ['waiting', 'writing', 'queued'].includes(run.state);

/** A question with its handles as buttons that open what they name. `files` are those of the turn by handle. */
export const withChips = (text, files, open) => {
  const known = new Map(Object.entries(files || {}).map(([handle, file]) => [fold(handle), { ...file, handle }]));
  const out = [];
  let at = 0;
  for (const match of text.matchAll(HANDLE)) {
    const name = handleIn(match[2], known) || match[2];
    const file = known.get(fold(name));
    const kind = match[1] === 'IMAGE' ? 'image' : 'document';
    const content = [picture(file || { kind }), name];
    out.push(text.slice(at, match.index));
    out.push(file && open
      ? h('button', { type: 'button', class: 'chip', onclick: () => open(file), title: `Open ${match[1]}#${name}` }, content)
      : h('span', { class: 'chip' }, content));
    at = match.index + match[1].length + 1 + name.length;
  }
  out.push(text.slice(at));
  return out;
};

const searchesOf = (run) => {
  const rounds = run.usage?.mpic.retrieval ||
    [...new Set(run.citations.map((one) => one.query))].map((query) => ({ query, error: null }));
  let left = run.citations;
  return rounds.map(({ query, error }) => {
    const citations = left.filter((one) => one.query === query);
    left = left.filter((one) => one.query !== query);  // the same words twice find the same
    return { query, error, citations };
  });
};

const found = (run, open) => {
  if (run.retrieval === 'off' || (!run.usage && !run.citations.length)) return null;
  const searches = searchesOf(run);
  if (!searches.length) return h('p', { class: 'hint' }, 'Nothing was looked up.');
  const missed = (error) => (!error ? '' : error === 'nothing_found' ? ': nothing was found' : ` without success (${error})`);
  return searches.map(({ query, error, citations }) => h('p', { class: 'found' }, `Looked up “${query.trim()}”${missed(error)} `,
    citations.map((one) => h('button', { type: 'button', class: 'chip cited', title: `similarity ${one.score.toFixed(2)}`,
      onclick: () => open({ reference: one.reference_id }) },
    picture({ kind: one.kind, id: one.reference_id, version: one.version }), one.title))));
};

const ADVICE = {
  context_length_exceeded: ' Delete earlier turns, or begin a new chat.',
  unknown_handle: ' It may be misspelt, or the file was renamed or deleted, or has expired. Type IMAGE# or FILE# in the question to choose a file.',
};
const body = (run, other) => {
  if (run.state === 'queued') return h('p', { class: 'hint' }, 'Waiting for the server; it is asked again as soon as it is back.');
  if (run.state === 'waiting') return h('div', { class: 'text dots', role: 'img', 'aria-label': 'waiting for the first token' }, h('i'), h('i'), h('i'));
  const text = !run.text ? null
    : run.state === 'done' && other?.state === 'done' ? h('div', { class: 'text plain' }, marked(run.text.trim(), other.text.trim())[0])
      : h('div', { class: `text${run.state === 'writing' ? ' writing' : ''}` }, markdown(run.text));
  if (run.state !== 'failed') return text || h('div', { class: 'text hint' }, 'The answer is empty.');
  const code = run.error?.code || 'internal_error';
  const advice = ADVICE[code] || '';
  return [text, h('p', { class: 'error', role: 'alert' }, h('b', {}, 'No answer. '), `${run.error?.message || ''}.${advice} `.replace(/([.!?])\./, '$1'), h('code', {}, code))];
};

const factor = (times) => (times >= 1 ? `${times.toFixed(1)}× sooner` : `${(1 / times).toFixed(1)}× later`);

/** The line below an answer: first token, share reused, how much sooner. */
export const factsOf = (run, again, perToken) => {
  const { mpic, prompt_tokens: tokens } = run.usage;
  const facts = [[ms(mpic.ms.ttft), h('span', { class: 'spacious' }, ' to the first token')], `${Math.round((100 * saved(run.usage)) / Math.max(1, tokens))} % reused`];
  if (again?.state === 'done' && again.usage) facts.push(factor(again.usage.mpic.ms.ttft / Math.max(mpic.ms.ttft, 0.01)));
  else if (perToken && saved(run.usage) && run.policy !== 'full') {
    const times = (mpic.ms.ttft + perToken * saved(run.usage)) / Math.max(mpic.ms.ttft, 0.01);
    if (times >= 1.1) facts.push(`about ${times.toFixed(1)}× sooner`);
  }
  return facts;
};

const figures = (run, other, open) => {
  const trace = run.usage?.mpic.trace;
  if (!trace) return h('p', { class: 'hint' }, 'This answer has no trace.');
  const scale = Math.max(run.usage.mpic.ms.ttft, other?.usage?.mpic.ms.ttft || 0);
  return [h('h2', {}, 'What was reused'), strip(trace, (block) => open(block.id?.startsWith('ref') ? { reference: block.id } : { id: block.id, kind: block.kind, handle: block.label })),
    h('h2', {}, 'Time to the first token'), waterfall(trace.times, scale)];
};

const verdict = ({ answer, again }) => {
  if (answer.state !== 'done' || again?.state !== 'done' || !answer.usage || !again.usage) return null;
  const same = answer.text.trim() === again.text.trim(), won = again.usage.mpic.ms.ttft - answer.usage.mpic.ms.ttft;
  const fewer = saved(answer.usage) - saved(again.usage);
  const time = won >= 0 ? `${ms(won)} sooner` : `${ms(-won)} later`;
  const sampled = !same && again.temperature  // earlier versions of the page kept none with an answer
    ? ` At temperature ${again.temperature} two answers may differ by chance; 0 in the settings compares fairly.` : '';
  return h('p', { class: `verdict ${same ? 'same' : 'differs'}` },
    h('b', {}, same ? 'Reuse did not change the answer. ' : 'The answers differ; what differs is marked. '),
    `With reuse the first token came ${time}, and ${fewer} fewer tokens were computed.${sampled}`);
};

const runOf = (turn, run, other, view) => {
  const policy = run.usage?.mpic.policy || run.policy;
  const head = h('p', { class: 'run-head' }, policy && h('code', {}, policy),
    run === turn.again ? ' without reuse' : ' with reuse', run.state === 'stopped' ? h('span', { class: 'stopped' }, ' stopped') : '');
  const stopped = run.state === 'stopped' && !turn.again ? h('p', { class: 'hint stopped' }, 'Stopped.') : null;
  return h('div', { class: 'run' }, turn.again ? head : null, body(run, other), found(run, view.open), stopped);
};

const line = (turn, view) => {
  const { answer } = turn;
  if (running(answer)) return null;
  const facts = answer.usage && h('button', {
    type: 'button', class: 'facts', 'aria-expanded': String(view.expanded), onclick: view.toggle, data: { key: 'facts' }, title: 'What was reused, and when',
  }, factsOf(answer, turn.again, view.perToken).map((fact) => h('span', {}, fact)));
  const busy = running(turn.again);
  return h('div', { class: 'turn-line' }, facts, h('span', { class: 'grow' }),
    answer.state === 'failed' ? button('Try again', view.regenerate, { class: 'button small', data: { key: 'retry' } })
      : answer.state === 'done' && !busy && button(turn.again ? 'Compare once more' : 'Compare', view.compare,
        { class: 'button quiet small spacious', title: 'Answer again without reuse, side by side', data: { key: 'compare' } }),
    answer.text && iconButton('copy', 'Copy the answer', view.copy, { data: { key: 'copy' } }),
    !busy && menu('More about this turn', () => [
      ['Answer again', view.regenerate], ['Edit the question', view.edit],
      answer.state === 'done' && ['Answer again without reuse', view.compare],
      ['Delete this turn', view.remove, { bad: true }]], { data: { key: 'more' } }));
};

/** Renders a turn. `view` has what it can do, `open` for files, and whether its figures are shown (`expanded`). */
export const renderTurn = (turn, view) => {
  const question = view.editing ? (view.editor ||= editor(turn, view))
    : h('div', { class: 'question' }, h('div', { class: 'bubble' }, h('span', { class: 'unseen' }, 'You asked: '), withChips(turn.text, turn.files, view.open)));
  const answers = h('div', { class: `runs${turn.again ? ' two' : ''}` },
    runOf(turn, turn.answer, turn.again, view), turn.again ? runOf(turn, turn.again, turn.answer, view) : null);
  const shown = view.expanded && h('div', { class: `figures runs${turn.again ? ' two' : ''}` },
    [turn.answer, turn.again].filter((run) => run?.usage).map((run) => h('div', { class: 'run' }, figures(run, run === turn.answer ? turn.again : turn.answer, view.open))));
  return [question, h('div', { class: 'answer' }, verdict(turn), answers, line(turn, view), shown || '')];
};

const editor = (turn, view) => {
  const area = h('textarea', { rows: 2, 'aria-label': 'Edit the question', class: 'edit-box', value: turn.text, data: { key: 'edit' } });
  area.addEventListener('keydown', (event) => {
    if (composing(event)) return;
    if (event.key === 'Escape') { event.preventDefault(); view.endEdit(); }
    if (event.key === 'Enter' && !event.shiftKey) { event.preventDefault(); view.resend(area.value); }
  });
  return h('div', { class: 'question editing' }, area, h('div', { class: 'row end' },
    button('Cancel', view.endEdit, { class: 'button small' }), button('Send again', () => view.resend(area.value), { class: 'button primary small' })));
};
