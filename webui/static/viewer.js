// Opens what one sees: an image large, a document as text with the borders of its chunks, a reference with its metadata.
import { button, count, date, h, mention, size } from './dom.js';
import { get, send } from './api.js';
import { dialog, download, failed } from './ui.js';
import { insert } from './box.js';
import { rename } from './files.js';

const MOST_CHARS = 200_000;

const facts = (rows) => h('dl', { class: 'details' }, rows.filter(([, value]) => value !== null && value !== undefined && value !== '')
  .map(([name, value]) => [h('dt', {}, name), h('dd', {}, String(value))]));

/** The text of a document, a section for each of its chunks. `chunks` say where each begins and ends, in characters. */
const sections = (text, item) => {
  const chunks = item.chunks?.length ? item.chunks : [{ start: 0, end: text.length, tokens: item.tokens }];
  const characters = [...text];
  return h('div', { class: 'document-text', tabindex: '0', role: 'region', 'aria-label': 'Text' }, chunks.map((chunk, i) => h('section', { class: 'chunk' },
    h('h3', {}, `${item.chunk_count > chunks.length ? `${item.chunk_count} chunks` : `Chunk ${i + 1} of ${chunks.length}`}${chunk.tokens ? ` · ${count(chunk.tokens, 'token')}` : ''}`),
    h('pre', {}, characters.slice(chunk.start, Math.min(chunk.end, chunk.start + MOST_CHARS)).join('')),
    chunk.end - chunk.start > MOST_CHARS ? h('p', { class: 'hint' }, 'Only the beginning is shown; the download has all of it.') : null)));
};

const image = (data, item) => {
  const url = URL.createObjectURL(new Blob([data], { type: 'image/png' }));  // browsers look at the bytes, not at the type
  const shown = h('img', { class: 'large', src: url, alt: item.title || mention(item) });
  shown.addEventListener('load', () => {
    URL.revokeObjectURL(url);
    if (shown.naturalWidth < 256) shown.classList.add('tiny');
    shown.after(h('p', { class: 'hint' }, `${shown.naturalWidth} × ${shown.naturalHeight} pixels`));
  });
  shown.addEventListener('error', () => {
    URL.revokeObjectURL(url);
    shown.replaceWith(h('p', { class: 'hint' }, 'This browser cannot show that image; the download has it.'));
  });
  return shown;
};

const show = async (path, item, title, rows, actions) => {
  const place = h('div', { class: 'opened' }, h('p', { class: 'hint' }, 'Loading …'));
  let data = null;
  const load = async () => { data ??= await (await send(`${path}/content`)).arrayBuffer(); return data; };
  const save = () => load().then((bytes) => download(item.filename, new Blob([bytes]))).catch(failed);
  const made = dialog(title, [place, facts(rows),
    h('div', { class: 'row end' }, button('Download', save, { class: 'button' }), actions(() => made.close()))], { wide: true });
  if (item.kind === 'video') {  // not fetched only to say so
    place.replaceChildren(h('p', { class: 'hint' }, 'A clip. The download has it.'));
    return;
  }
  try {
    const bytes = await load();
    place.replaceChildren(item.kind === 'image' ? image(bytes, item) : sections(new TextDecoder().decode(bytes), item));
  } catch (error) {
    place.replaceChildren(h('p', { class: 'error', role: 'alert' }, `${error.message} [${error.code}]`));
  }
};

const showFile = async (id) => {
  const file = await get(`/v1/files/${id}`);
  const rows = [
    ['File', file.filename], ['State', file.state], ['Why', file.status_details], ['Chunks', file.chunks?.length || file.chunk_count || 1], ['Tokens', file.tokens],
    ['Size', size(file.bytes)], ['Added', date(file.created_at)], ['Expires', file.expires_at && date(file.expires_at)],
    ['Kept compiled in', file.tiers?.join(', ')], ['Id', file.id]];
  await show(`/v1/files/${id}`, file, mention(file), rows, (close) => [
    button('Rename', () => { close(); rename(file); }, { class: 'button' }),
    button('Put into the question', () => { close(); insert(mention(file)); }, { class: 'button primary' })]);
};

const showReference = async (id) => {
  const found = await get(`/v1/references/${id}`);
  const rows = [
    ['Description', found.description], ...Object.entries(found.metadata || {}), ['File', found.filename], ['State', found.state],
    ['Why', found.error], ['Tokens', found.tokens], ['Size', size(found.bytes)], ['Version', found.version],
    ['Added', date(found.created_at)], ['Changed', date(found.updated_at)], ['SHA-256', found.sha256], ['Id', found.id]];
  await show(`/v1/references/${id}`, found, found.title, rows, () => []);
};

/** Opens a file ({id}) or a reference ({reference}: its id). */
export const open = async (what) => {
  try {
    await (what.reference ? showReference(what.reference) : showFile(what.id));
  } catch (error) {
    const gone = error.status === 404;
    dialog(what.handle || 'It cannot be opened', h('p', {}, gone ? 'It was deleted, or it has expired.' : `${error.message} [${error.code}]`));
  }
};
