// The text box for a question, and putting text into it.
import { $ } from './dom.js';

export const box = () => $('#box');

/** Puts a text into the box as if it had been typed. */
export const write = (area, text, caret) => {
  area.value = text;
  area.dispatchEvent(new Event('input', { bubbles: true }));
  area.focus();
  area.setSelectionRange(caret, caret);
};

/** Puts a handle where the caret is. */
export const insert = (name) => {
  const area = box(), before = area.value.slice(0, area.selectionStart), after = area.value.slice(area.selectionStart);
  const piece = (before && !/\s$/.test(before) ? ' ' : '') + name + (/^\s/.test(after) ? '' : ' ');
  write(area, before + piece + after, (before + piece).length);
};
