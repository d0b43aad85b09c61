// A run is one answer to a question: what it asks the server for, and what came of it.
import { settings } from './store.js';
import { withHandlesOfNow } from './files.js';

let standard = '', withoutChunks = new Set();
/** Takes note of the policies that the server offers, its default first. */
export const notePolicies = (policies) => {
  standard = policies[0].name;
  withoutChunks = new Set(policies.filter((one) => !one.uses_chunks).map((one) => one.name));
};

/** What a run asks for beside the conversation: what the settings say when it is made, and so what it is compared under. */
export const wishesOf = (run) => {
  const { retrieval, system, temperature, length } = { ...settings, ...run };  // earlier versions of the page kept fewer
  return { retrieval, system, temperature, length };
};
/** A press has no effect under a policy that reads no compiled chunk, and is refused with it. */
const pressUnder = (policy) => (withoutChunks.has(policy || standard) ? '' : settings.press);
export const newRun = (policy) => ({ policy, press: pressUnder(policy), ...wishesOf({}), text: '', state: 'waiting', error: null, usage: null, citations: [] });

const messagesOf = (turns, asked, system) => {
  const out = system ? [{ role: 'system', content: system }] : [];
  for (const turn of turns.filter((one) => one.at < asked.at)) {
    if (!turn.answer.text || turn.answer.state === 'failed') continue;
    out.push({ role: 'user', content: withHandlesOfNow(turn) }, { role: 'assistant', content: turn.answer.text });
  }
  return [...out, { role: 'user', content: withHandlesOfNow(asked, true) }];
};

/** The request for a run of a turn, behind the turns before it. */
export const bodyOf = (turns, turn, run) => {
  const { system, temperature, length } = wishesOf(run);
  const mpic = { trace: true };
  if (run.policy) mpic.policy = run.policy;
  if (run.press) mpic.press = run.press;
  if (run.retrieval !== 'off') mpic.retrieval = run.retrieval;
  return { messages: messagesOf(turns, turn, system), stream: true, stream_options: { include_usage: true }, max_tokens: length,
    ...(temperature ? { temperature } : {}), mpic };
};
