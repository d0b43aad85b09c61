// The references page: files that answers of every user may use; administrators add and remove them.
import { $, button, count, h, iconButton, picture, size } from './dom.js';
import { call, get, upload } from './api.js';
import { confirm, failed, toast } from './ui.js';
import { open } from './viewer.js';

const PAGE = 60, FOUND = 12, SIDE = 384, SOON = 1500;
let admin = false, shelf = null, note = null, queryPicture = null, image = '', form = null, timer = 0;

/** A small PNG of a picture as a data URL; an embedder sees no more. */
const shrink = async (file) => {
  const bitmap = await createImageBitmap(file), scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = h('canvas', { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  canvas.getContext('2d').drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL('image/png');
};

const remove = async (reference) => {
  const sure = await confirm('Remove this reference?', `“${reference.title}” is shared by all users of this server. It cannot be brought back.`, 'Remove');
  if (!sure) return;
  try {
    await call('DELETE', `/v1/references/${reference.id}`);
    toast(`“${reference.title}” was removed.`);
  } catch (error) { failed(error); }
  all();
};

const facts = (one) => [one.tokens && count(one.tokens, 'token'), size(one.bytes), one.state !== 'ready' && one.state].filter(Boolean).join(' · ');
const card = (one) => h('li', { class: 'card reference', data: { id: one.id, state: one.state } },
  h('button', { type: 'button', class: 'card-open', onclick: () => open({ reference: one.id }), title: `Open ${one.title}` },
    picture({ kind: one.kind, id: one.id, version: one.sha256.slice(0, 16) }), h('span', {}, h('b', {}, one.title), h('small', {}, facts(one)), one.description && h('small', {}, one.description))),
  one.score === undefined ? null : h('span', { class: 'score', title: 'similarity to the query' }, one.score.toFixed(2)),
  admin && iconButton('close', `Remove ${one.title}`, () => remove(one)));

const show = (found, text, more) => {
  if (note.textContent !== text) note.textContent = text;  // a status, which is read out whenever it is set
  const focused = shelf.contains(document.activeElement) ? document.activeElement : null, { id } = focused?.closest('li').dataset || {};
  shelf.replaceChildren(...found.map(card));
  if (more) shelf.append(h('li', { class: 'more' }, button('Show more', more)));
  if (id) $(`[data-id="${CSS.escape(id)}"] [title="${CSS.escape(focused.title)}"]`, shelf)?.focus();
};

let asked = 0;  // how often the shelf was asked for something; an answer that is overtaken is not shown

/** Shows all references, newest first; asks again while one of them is compiled. */
const all = async (known = [], after = '') => {
  clearTimeout(timer);
  const own = ++asked;
  try {
    const page = await get(`/v1/references?limit=${PAGE}${after && `&after=${after}`}`);
    if (own !== asked) return;
    const found = [...known, ...page.data];
    show(found, found.length ? `${count(found.length, 'reference')}${page.has_more ? ' and more' : ''}, newest first` : 'No references yet.', page.has_more && (() => all(found, page.last_id)));
    if (!known.length && found.some((one) => one.state === 'compiling')) timer = setTimeout(() => { if (!$('#view-references').hidden) all(); }, SOON);
  } catch (error) { failed(error); }
};

const search = async (event) => {
  event?.preventDefault();
  const query = form.elements.query.value.trim();
  if (!query && !image) return all();
  clearTimeout(timer);
  const own = ++asked;
  try {
    const { data } = await call('POST', '/v1/references/search', { ...(query ? { query } : {}), ...(image ? { image } : {}), top_k: FOUND });
    if (own !== asked) return null;
    const like = [query && `“${query}”`, image && 'the picture'].filter(Boolean).join(' and ');
    return show(data, data.length ? `${count(data.length, 'reference')} most like ${like}` : `Nothing is like ${like}.`);
  } catch (error) { return failed(error); }
};

const setPicture = (url) => {
  image = url;
  queryPicture.replaceChildren(...(url ? [h('img', { class: 'query-picture', src: url, alt: 'The picture that is searched for' }),
    iconButton('close', 'Search without the picture', () => { setPicture(''); search(); })] : []));
};

const searchForm = () => {
  const file = h('input', { type: 'file', accept: 'image/*', hidden: true, 'aria-label': 'Picture to search for' });
  file.addEventListener('change', async () => {
    try {
      setPicture(await shrink(file.files[0]));
      search();
    } catch { toast('This browser cannot read that image.', { bad: true }); }
    file.value = '';
  });
  queryPicture = h('span', { class: 'row', id: 'query-picture' });
  form = h('form', { class: 'find', role: 'search', 'aria-label': 'References', onsubmit: search },
    h('div', { class: 'field' }, h('label', { for: 'query' }, 'Search by words'), h('input', { type: 'search', id: 'query', name: 'query', autocomplete: 'off' })),
    file, h('div', { class: 'row' }, queryPicture, h('button', { class: 'button primary' }, 'Search'), button('Search by a picture', () => file.click()),
      button('Show all', () => { form.reset(); setPicture(''); all(); }, { class: 'button quiet' })));
  return form;
};

const addForm = () => {
  const said = h('p', { class: 'hint', role: 'status' });
  const field = (label, name, props, hint) => h('div', { class: 'field' }, h('label', { for: `add-${name}` }, label),
    h('input', { id: `add-${name}`, name, 'aria-describedby': hint ? `hint-${name}` : null, ...props }), hint && h('p', { class: 'hint', id: `hint-${name}` }, hint));
  const made = h('form', {
    class: 'stack', onsubmit: async (event) => {
      event.preventDefault();
      const fields = Object.fromEntries([...new FormData(made)].filter(([, value]) => value !== ''));
      const adding = $('button', made);
      if (adding.disabled) return;
      adding.disabled = true;  // a second click would add it twice
      said.textContent = 'Adding …';
      try {
        const added = await upload('/v1/references', fields);
        said.textContent = `Added “${added.title}”.`;
        made.reset();
        all();
      } catch (error) { said.textContent = ''; failed(error); }
      adding.disabled = false;
    },
  }, field('Image or text', 'file', { type: 'file', required: true }),
  field('Title', 'title', { type: 'text', maxlength: 200 }, 'Left empty, it is the name of the file.'),
  field('Description', 'description', { type: 'text', maxlength: 2000 }, 'What it shows, in a sentence. It is shown with the reference; searches look at the content only.'),
  h('div', { class: 'row' }, h('button', { class: 'button primary' }, 'Add')), said);
  return h('details', { class: 'panel add-reference' }, h('summary', {}, 'Add a reference'), made);
};

/** Fills the page once, and asks for the references whenever it is opened. */
export const showReferences = (about) => {
  if (shelf) return all();
  admin = about.role === 'admin';
  note = h('p', { class: 'hint', role: 'status', id: 'shelf-note' });
  shelf = h('ul', { class: 'cards', id: 'shelf', 'aria-label': 'References' });
  $('#view-references').replaceChildren(h('h2', {}, 'References'),
    h('p', { class: 'lead' }, 'Images and texts that answers of every user may use: choose “Search when needed” below your question.'),
    searchForm(), admin ? addForm() : '', note, shelf);
  return all();
};
