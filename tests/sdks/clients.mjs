// One conversation by a client library: `node clients.mjs NAME URL`; prints the texts that it got as JSON.
const [name, url] = process.argv.slice(2);
const question = "Price each line.\n3 pens at $20";
const asked = { model: "demo", temperature: 0 };

async function openai() {
  const { default: OpenAI } = await import("openai");
  const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const messages = [{ role: "user", content: question }];
  const whole = await client.chat.completions.create({ ...asked, messages });
  const streamed = await client.chat.completions.stream({ ...asked, messages }).finalContent();
  const response = await client.responses.create({ ...asked, input: question });
  const final = await client.responses.stream({ ...asked, input: question }).finalResponse();
  return [whole.choices[0].message.content, streamed, response.output_text, final.output_text];
}

async function ai() {
  const { generateText, streamText, generateObject } = await import("ai");
  const { createOpenAI } = await import("@ai-sdk/openai");
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const { z } = await import("zod");
  const provider = createOpenAI({ baseURL: url, apiKey: "none" }); // its default is responses
  const compatible = createOpenAICompatible({ name: "aspd", baseURL: url, supportsStructuredOutputs: true });
  const texts = [];
  for (const model of [provider("demo"), provider.chat("demo"), compatible("demo")]) {
    const settings = { model, prompt: question, temperature: 0, maxRetries: 0 };
    texts.push((await generateText(settings)).text, await streamText(settings).text);
    const { object } = await generateObject({ ...settings, schema: z.object({ good: z.boolean() }) });
    if (typeof object.good !== "boolean") throw new Error("no object of the schema");
  }
  return texts;
}

async function ai_tools() {
  const { generateText, streamText, tool, stepCountIs } = await import("ai");
  const { createOpenAI } = await import("@ai-sdk/openai");
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const { z } = await import("zod");
  const provider = createOpenAI({ baseURL: url, apiKey: "none" }); // its default is responses
  const compatible = createOpenAICompatible({ name: "aspd", baseURL: url });
  const done = [];
  const execute = async ({ kind }) => {
    if (!["pen", "cup"].includes(kind)) throw new Error("no good of the schema");
    done.push("called");
    return "20";
  };
  const inputSchema = z.object({ kind: z.enum(["pen", "cup"]) });
  const tools = { price: tool({ description: "Return a price", inputSchema, execute }) };
  // The server stores no responses, so that later steps need their items in full.
  const providerOptions = { openai: { store: false } };
  for (const model of [provider("demo"), provider.chat("demo"), compatible("demo")]) {
    const settings = { model, prompt: question, temperature: 0, maxRetries: 0, tools };
    await generateText(settings);
    const called = { ...settings, toolChoice: { type: "tool", toolName: "price" } };
    const whole = await generateText(called);
    const streamed = streamText(called);
    const [call] = await streamed.toolCalls;
    if (call.input.kind !== whole.toolCalls[0].input.kind) throw new Error("another call in the stream");
    const { steps } = await generateText({ ...called, providerOptions, stopWhen: stepCountIs(2) });
    if (steps.length !== 2) throw new Error("no step after the result of the tool");
  }
  return done;
}

console.log(JSON.stringify(await { openai, ai, ai_tools }[name]()));
