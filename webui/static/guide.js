// The page that helps to choose a policy, with what was measured.
import { $, h } from './dom.js';

const figure = ({ name, title, text }) => h('figure', { class: 'panel plot' },
  h('a', { href: `/ui/plots/${name}.png`, target: '_blank', rel: 'noopener' }, h('img', { src: `/ui/plots/${name}.png`, alt: `Plot: ${title}`, loading: 'lazy' })),
  h('figcaption', {}, h('b', {}, title), ` ${text}`));

const row = (one, i) => h('tr', {}, h('td', {}, h('code', {}, one.name), i ? '' : h('small', {}, ' default')), h('td', {}, one.about),
  h('td', {}, one.lost === null ? '–' : one.lost.toFixed(1)), h('td', {}, one.fewer === null ? '–' : `${one.fewer.toFixed(1)} ×`));

/** Fills the page. */
export const showGuide = ({ policies, plots }) => {
  const place = $('#view-policies');
  if (place.firstChild) return;
  place.replaceChildren(h('h2', {}, 'Which policy?'),
    h('p', { class: 'lead' }, 'A policy decides which tokens of your images and documents are computed again when they are linked into a prompt. Computing more of them takes longer and brings the answer closer to the one without reuse.'),
    h('ol', { class: 'steps' }, h('li', {}, 'Start with ', h('code', {}, policies[0].name), ', this server’s default.'),
      h('li', {}, 'Ask a few questions of your own and press ', h('b', {}, 'Compare'), '. Differences are marked.'),
      h('li', {}, 'If answers differ, take a larger number (', h('code', {}, 'mpic-32'), '). If they never do, try a smaller one, or ', h('code', {}, 'reuse'), '.')),
    h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'Policies' }, h('table', { class: 'table' },
      h('thead', {}, h('tr', {}, ['Policy', 'What it does', 'Points lost, of 100', 'Fewer operations'].map((head) => h('th', { scope: 'col' }, head)))),
      h('tbody', {}, policies.map(row)))),
    h('p', { class: 'hint' }, 'Points and operations were measured on the demo model (docs/evidence); below 0, more answers were right than without reuse. Other models differ: mpic eval measures yours.'),
    h('h2', {}, 'What was measured'),
    plots.length ? h('div', { class: 'plots' }, plots.map(figure)) : h('p', { class: 'hint' }, 'No results are kept with this installation; make bench measures on your machine.'));
};
