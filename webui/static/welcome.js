// The empty state: what this model knows, and questions to try.
import { $, HANDLE, fold, h } from './dom.js';
import { send } from './api.js';
import { failed } from './ui.js';
import { ask } from './chat.js';
import { known, refresh } from './files.js';
import { uploadFile } from './uploads.js';

const WAIT_MS = 20_000;

/** A question with small pictures of the samples in it. */
const pictured = (sample) => {
  const out = [];
  let at = 0;
  for (const match of sample.text.matchAll(HANDLE)) {
    out.push(sample.text.slice(at, match.index));
    const image = match[1] === 'IMAGE';
    out.push(h('span', { class: 'chip' }, image ? h('img', { class: 'thumb', src: `/ui/samples/${match[2]}`, alt: '' }) : h('span', { class: 'thumb document', 'aria-hidden': 'true' }), match[2]));
    at = match.index + match[0].length;
  }
  return [...out, sample.text.slice(at)];
};

const prepare = async (sample) => {
  const there = known();
  for (const [handle, name] of Object.entries(sample.files)) {
    if (there.has(fold(handle))) continue;
    const blob = await (await send(`/samples/${handle}`)).blob();
    if (!await uploadFile(new File([blob], name, { type: blob.type }), handle)) return false;
  }
  const until = Date.now() + WAIT_MS;
  do {
    await refresh();
    const used = Object.keys(sample.files).map((handle) => known().get(fold(handle)));
    if (used.every((file) => file && file.state !== 'compiling')) break;
    await new Promise((done) => { setTimeout(done, 300); });
  } while (Date.now() < until);
  return true;
};

const tryIt = async (sample, place) => {
  if (place.getAttribute('aria-busy') === 'true') return;
  place.setAttribute('aria-busy', 'true');
  try {
    if (!await prepare(sample)) return;
    // the clicked sample goes away with the empty state; a phone would open its keyboard over the answer
    $(matchMedia('(pointer: fine)').matches ? '#box' : '#main').focus();
    await ask(sample.text);
  } catch (error) { failed(error); } finally { place.removeAttribute('aria-busy'); }
};

/** Shows the empty state. */
export const showWelcome = ({ model, samples }) => {
  const knows = model.knows.length
    ? [h('p', {}, `This server runs the model “${model.name}”, a small one for trying things out. It knows:`), h('ul', {}, model.knows.map((one) => h('li', {}, one))), h('p', {}, model.not)]
    : [h('p', {}, `This server runs “${model.name}”, with ${model.context_length.toLocaleString('en')} tokens of context${model.images ? ', for texts and images' : ', for texts only'}. ${model.not}`)];
  const place = h('div', { class: 'samples' });
  place.append(...samples.map((sample) => h('button', { type: 'button', class: 'sample', onclick: () => tryIt(sample, place), data: { sample: sample.id } },
    h('b', {}, sample.title), h('span', {}, pictured(sample)))));
  $('#welcome').replaceChildren(h('div', { class: 'welcome' },
    h('h2', {}, 'Ask about your images and documents'),
    h('p', {}, 'Add files; each is compiled once and gets a handle such as ', h('code', {}, 'IMAGE#CAT'), '. Write handles anywhere in a question, in any order. Below each answer you see how much was reused.'),
    h('section', { class: 'knows', 'aria-labelledby': 'knows' }, h('h3', { id: 'knows' }, 'What this model knows'), knows,
      model.instead ? h('p', {}, 'To serve a model of your own: ', h('code', {}, model.instead)) : null),
    samples.length ? [h('h3', {}, 'Try one of these'), h('p', { class: 'hint' }, 'A click adds the files it needs and asks.'), place] : null));
};
