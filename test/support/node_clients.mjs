// Runs the flows of one client against a server and prints their results as JSON: {flow: result or {error}}.
// node node_clients.mjs FOLDER_OF_NODE_MODULES BASE_URL CLIENT
import { createRequire } from 'node:module';
import { join } from 'node:path';

const [folder, baseUrl, client] = process.argv.slice(2);
const require = createRequire(join(folder, 'flows.js'));
const { z } = require('zod');
const v1 = `${baseUrl}/v1`;
const model = 'demo-tools';
const HELLO = 'Hello!';
const SUM = 'What is 4821 + 377?';
const RESULT = '99123'; // not the sum: the last answer can only come from the tool
// Anthropic's SDK leaves bounds out of schemas; without them the model would write arrays and numbers for ever.
const Trip = z.object({
  kind: z.enum(['city', 'village']),
  days: z.literal([3, 7]),
  sunny: z.boolean(),
  stop: z.object({ code: z.enum(['OSL', 'FCO']) }),
  note: z.enum(['early', 'late']).nullable(),
});
const usageOf = (usage) => JSON.parse(JSON.stringify(usage));

async function openaiChat() {
  const OpenAI = require('openai');
  const { zodResponseFormat, zodFunction } = require('openai/helpers/zod');
  const { create, parse, stream, runTools } = bound(new OpenAI({ baseURL: v1, apiKey: 'none', maxRetries: 0 }).chat.completions);
  const ask = (content, more = {}) => ({ model, temperature: 0, max_tokens: 200, messages: [{ role: 'user', content }], ...more });
  const calculator = zodFunction({ name: 'calculator', parameters: z.object({ expression: z.string() }) });
  const format = { response_format: zodResponseFormat(Trip, 'trip') };
  return {
    plain: async () => {
      const answer = await create(ask(HELLO));
      return { text: answer.choices[0].message.content, end: answer.choices[0].finish_reason, usage: usageOf(answer.usage) };
    },
    stream: async () => {
      const parts = [];
      let usage = null;
      for await (const chunk of await create(ask(HELLO, { stream: true, stream_options: { include_usage: true } }))) {
        if (chunk.choices[0]?.delta.content) parts.push(chunk.choices[0].delta.content);
        usage = chunk.usage ?? usage;
      }
      return { text: parts.join(''), parts: parts.length, usage: usageOf(usage) };
    },
    tools: async () => {
      const messages = [{ role: 'user', content: SUM }];
      const called = (await create(ask('', { messages, tools: [calculator] }))).choices[0];
      const call = called.message.tool_calls[0];
      messages.push(called.message, { role: 'tool', tool_call_id: call.id, content: RESULT });
      const last = (await create(ask('', { messages, tools: [calculator] }))).choices[0];
      messages.push(last.message, { role: 'user', content: HELLO });
      const turn = (await create(ask('', { messages }))).choices[0];
      return { input: JSON.parse(call.function.arguments), end: called.finish_reason, text: last.message.content, turn: turn.message.content };
    },
    runTools: async () => {
      const inputs = [];
      const tool = { type: 'function', function: { name: 'calculator', description: 'Computes.', parse: JSON.parse, function: (input) => { inputs.push(input); return RESULT; },
        parameters: { type: 'object', properties: { expression: { type: 'string' } }, required: ['expression'] } } };
      const runner = runTools(ask(SUM, { stream: true, tools: [tool] }));
      return { text: await runner.finalContent(), input: inputs[0], runs: inputs.length };
    },
    object: async () => ({ value: (await parse(ask('Plan.', format))).choices[0].message.parsed }),
    streamObject: async () => ({ value: (await stream(ask('Plan.', format)).finalChatCompletion()).choices[0].message.parsed }),
  };
}

async function openaiResponses() {
  const OpenAI = require('openai');
  const { zodTextFormat } = require('openai/helpers/zod');
  const { create, parse, stream } = bound(new OpenAI({ baseURL: v1, apiKey: 'none', maxRetries: 0 }).responses);
  const ask = (input, more = {}) => ({ model, temperature: 0, max_output_tokens: 200, input, ...more });
  const tools = [{ type: 'function', name: 'calculator', strict: false, parameters: { type: 'object', properties: { expression: { type: 'string' } } } }];
  const format = { text: { format: zodTextFormat(Trip, 'trip') } };
  return {
    plain: async () => {
      const answer = await create(ask(HELLO));
      return { text: answer.output_text, end: answer.status, usage: usageOf(answer.usage) };
    },
    stream: async () => {
      const parts = [];
      let usage = null;
      for await (const event of await create(ask(HELLO, { stream: true }))) {
        if (event.type === 'response.output_text.delta') parts.push(event.delta);
        if (event.type === 'response.completed') usage = event.response.usage;
      }
      return { text: parts.join(''), parts: parts.length, usage: usageOf(usage) };
    },
    tools: async () => {
      const first = await create(ask(SUM, { tools }));
      const call = first.output.find((item) => item.type === 'function_call');
      const output = { type: 'function_call_output', call_id: call.call_id, output: RESULT };
      const kept = await create(ask([output], { tools, previous_response_id: first.id }));
      const sent = await create(ask([{ role: 'user', content: SUM }, ...first.output, output], { tools, store: false }));
      const turn = await create(ask(HELLO, { previous_response_id: kept.id }));
      return { input: JSON.parse(call.arguments), text: kept.output_text, sent: sent.output_text, turn: turn.output_text };
    },
    object: async () => ({ value: (await parse(ask('Plan.', format))).output_parsed }),
    streamObject: async () => ({ value: (await stream(ask('Plan.', format)).finalResponse()).output_parsed }),
  };
}

async function anthropic() {
  const Anthropic = require('@anthropic-ai/sdk');
  const { zodOutputFormat } = require('@anthropic-ai/sdk/helpers/zod');
  const { betaZodTool } = require('@anthropic-ai/sdk/helpers/beta/zod');
  const sdk = new Anthropic({ baseURL: baseUrl, apiKey: 'none', maxRetries: 0 });
  const { create, parse, stream, countTokens } = bound(sdk.messages);
  const ask = (content, more = {}) => ({ model, temperature: 0, max_tokens: 200, messages: [{ role: 'user', content }], ...more });
  const tools = [{ name: 'calculator', input_schema: { type: 'object', properties: { expression: { type: 'string' } } } }];
  const format = { output_config: { format: zodOutputFormat(Trip) } };
  const textOf = (message) => message.content.filter((block) => block.type === 'text').map((block) => block.text).join('');
  return {
    plain: async () => {
      const answer = await create(ask(HELLO));
      const { input_tokens } = await countTokens({ model, messages: ask(HELLO).messages });
      return { text: textOf(answer), end: answer.stop_reason, usage: usageOf(answer.usage), counted: input_tokens };
    },
    stream: async () => {
      const parts = [];
      const answer = await stream(ask(HELLO)).on('text', (text) => parts.push(text)).finalMessage();
      return { text: parts.join(''), parts: parts.length, usage: usageOf(answer.usage) };
    },
    tools: async () => {
      const messages = [{ role: 'user', content: SUM }];
      const called = await create(ask('', { messages, tools }));
      const call = called.content.find((block) => block.type === 'tool_use');
      messages.push({ role: 'assistant', content: called.content }, { role: 'user', content: [{ type: 'tool_result', tool_use_id: call.id, content: RESULT }] });
      const last = await create(ask('', { messages, tools }));
      messages.push({ role: 'assistant', content: last.content }, { role: 'user', content: HELLO });
      return { input: call.input, end: called.stop_reason, text: textOf(last), turn: textOf(await create(ask('', { messages }))) };
    },
    runTools: async () => {
      const inputs = [];
      const tool = betaZodTool({ name: 'calculator', description: 'Computes.', inputSchema: z.object({ expression: z.string() }), run: (input) => { inputs.push(input); return RESULT; } });
      const last = await sdk.beta.messages.toolRunner(ask(SUM, { tools: [tool] }));
      return { text: textOf(last), input: inputs[0], runs: inputs.length };
    },
    object: async () => ({ value: (await parse(ask('Plan.', format))).parsed_output }),
    streamObject: async () => ({ value: (await stream(ask('Plan.', format)).finalMessage()).parsed_output }),
  };
}

async function aiSdk(made) {
  const { Output, generateText, stepCountIs, streamText, tool } = require('ai');
  const options = { model: made, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
  const inputs = [];
  const calculator = tool({ description: 'Computes.', inputSchema: z.object({ expression: z.string() }), execute: async (input) => { inputs.push(input); return RESULT; } });
  const loop = { ...options, tools: { calculator }, stopWhen: stepCountIs(4) };
  const streamed = async (asked) => {
    const parts = [];
    let failure = null;
    const result = streamText({ ...asked, onError: ({ error }) => { failure = error; } });
    for await (const part of result.textStream) parts.push(part);
    if (failure) throw failure;
    return [parts, result];
  };
  return {
    plain: async () => {
      const answer = await generateText({ ...options, prompt: HELLO });
      return { text: answer.text, end: answer.finishReason, usage: usageOf(answer.usage), warnings: answer.warnings };
    },
    stream: async () => {
      const [parts, result] = await streamed({ ...options, prompt: HELLO });
      return { text: parts.join(''), parts: parts.length, usage: usageOf(await result.usage) };
    },
    tools: async () => {
      const first = await generateText({ ...loop, prompt: SUM });
      const messages = [{ role: 'user', content: SUM }, ...first.response.messages, { role: 'user', content: HELLO }];
      return { input: inputs[0], text: first.text, steps: first.steps.length, turn: (await generateText({ ...options, messages })).text };
    },
    runTools: async () => {
      const [parts, result] = await streamed({ ...loop, prompt: SUM });
      return { text: parts.join(''), input: inputs.at(-1), runs: (await result.steps).length - 1 };
    },
    object: async () => ({ value: (await generateText({ ...options, output: Output.object({ schema: Trip }), prompt: 'Plan.' })).output }),
    streamObject: async () => {
      const [, result] = await streamed({ ...options, output: Output.object({ schema: Trip }), prompt: 'Plan.' });
      return { value: await result.output };
    },
  };
}

const settings = { baseURL: v1, apiKey: 'none' };
const clients = {
  'openai chat': openaiChat,
  'openai responses': openaiResponses,
  anthropic,
  'ai-sdk openai': () => aiSdk(require('@ai-sdk/openai').createOpenAI(settings)(model)),
  'ai-sdk openai.chat': () => aiSdk(require('@ai-sdk/openai').createOpenAI(settings).chat(model)),
  'ai-sdk openai-compatible': () =>
    aiSdk(require('@ai-sdk/openai-compatible').createOpenAICompatible({ ...settings, name: 'fenceline', includeUsage: true, supportsStructuredOutputs: true })(model)),
  // It sends output_config.format for the models that it knows to have it, and a tool for others.
  'ai-sdk anthropic': () => aiSdk(require('@ai-sdk/anthropic').createAnthropic(settings)('claude-sonnet-4-5')),
  'ai-sdk anthropic, other model': () => aiSdk(require('@ai-sdk/anthropic').createAnthropic(settings)(model)),
};

function bound(resource) {
  return new Proxy(resource, { get: (target, name) => target[name].bind(target) });
}

const results = {};
for (const [name, flow] of Object.entries(await clients[client]())) {
  try {
    results[name] = await flow();
  } catch (error) {
    results[name] = { error: `${error.name}: ${error.message} ${error.responseBody ?? ''} ${error.cause?.message ?? ''}` };
  }
}
console.log(JSON.stringify(results));
