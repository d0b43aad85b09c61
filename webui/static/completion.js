// Completion of handles in the box: IMAGE# and FILE# open a list of what they may name.
import { $, composing, fold, h, mention, picture } from './dom.js';
import { announce } from './ui.js';
import { write } from './box.js';

/** Completes handles in `box`; `files` gives those there are. */
export const completeHandles = (box, files) => {
  const list = h('ul', { id: 'handle-list', role: 'listbox', 'aria-label': 'Handles', hidden: true });
  $('#box-frame').append(list);
  let choices = [], active = 0, from = 0;
  const close = () => {
    list.hidden = true;
    box.removeAttribute('aria-activedescendant');
    box.removeAttribute('aria-controls');
  };
  const draw = () => {
    list.replaceChildren(...choices.map((file, i) => h('li', {
      id: `handle-${i}`, role: 'option', class: i === active ? 'active' : '', 'aria-selected': String(i === active),
      onpointerdown: (event) => event.preventDefault(), onclick: () => complete(i),  // a finger that goes down may scroll
    }, picture(file), mention(file))));
    if (list.hidden) announce(`${choices.length} handles to choose from, with the arrow keys.`);
    list.hidden = false;
    box.setAttribute('aria-controls', list.id);
    box.setAttribute('aria-activedescendant', `handle-${active}`);
    list.children[active].scrollIntoView({ block: 'nearest' });
  };
  const complete = (i) => {
    const after = box.value.slice(box.selectionStart).replace(/^[A-Za-z0-9_.-]*/, '');
    const text = box.value.slice(0, from) + mention(choices[i]) + (/^\s/.test(after) ? '' : ' ');
    write(box, text + after, text.length);
    close();
  };
  const suggest = () => {
    const match = /(?:^|[^A-Za-z0-9_])((IMAGE|FILE)#([\p{L}\p{N}\p{M}_.-]*))$/iu.exec(box.value.slice(0, box.selectionStart));
    if (!match) return close();
    from = box.selectionStart - match[1].length;
    const image = match[2].toUpperCase() === 'IMAGE', typed = fold(match[3]);
    choices = files().filter((f) => f.handle && image === (f.kind === 'image') && fold(f.handle).includes(typed));
    choices.sort((a, b) => fold(b.handle).startsWith(typed) - fold(a.handle).startsWith(typed));
    if (!choices.length || (choices.length === 1 && fold(choices[0].handle) === typed)) return close();
    active = 0;
    return draw();
  };
  box.addEventListener('input', suggest);
  box.addEventListener('blur', close);
  box.addEventListener('keydown', (event) => {
    if (list.hidden || composing(event)) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) { active = (active + step + choices.length) % choices.length; draw(); }
    else if (event.key === 'Enter' || (event.key === 'Tab' && !event.shiftKey)) complete(active);
    else if (event.key === 'Escape') close();
    else return;
    event.preventDefault();
    event.stopImmediatePropagation();
  });
};
