// Asks a server as programs do with their packages from npm, and prints what they read as JSON.
// node clients.mjs URL '["text", ...]' QUERY
import { createOpenAI } from "@ai-sdk/openai";
import { createTogetherAI } from "@ai-sdk/togetherai";
import { embed, embedMany, rerank } from "ai";
import { CohereClient, CohereClientV2 } from "cohere-ai";
import { Ollama } from "ollama";
import OpenAI, { AzureOpenAI } from "openai";
import { VoyageAIClient } from "voyageai";

const [url, given, query] = process.argv.slice(2);
const texts = JSON.parse(given);
const apiKey = "any";
const byIndex = (ranked, score) => ranked.toSorted((a, b) => a.index - b.index).map(score);

const clients = {
  async openai() {
    const client = new OpenAI({ apiKey, baseURL: `${url}/v1` });
    const base64 = await client.embeddings.create({ model: "dense", input: texts });
    const floats = await client.embeddings.create({ model: "dense", input: texts, encoding_format: "float" });
    const models = await client.models.list();
    const azure = new AzureOpenAI({ apiKey, endpoint: url, apiVersion: "2024-10-21", deployment: "dense" });
    const deployed = await azure.embeddings.create({ model: "dense", input: texts });
    const error = await client.embeddings.create({ model: "nobody", input: texts }).catch((error) => error);
    return {
      dense: [base64, floats, deployed].map((answer) => answer.data.map((each) => each.embedding)),
      models: models.data.map((each) => each.id),
      error: { status: error.status, code: error.code, message: error.message },
    };
  },
  async "cohere-ai"() {
    const client = new CohereClientV2({ token: apiKey, environment: url });
    const old = new CohereClient({ token: apiKey, environment: url });
    const embedded = await client.embed({ model: "dense", texts, inputType: "clustering", embeddingTypes: ["float"] });
    const ranked = await client.rerank({ model: "ranker", query, documents: texts });
    const before = await old.rerank({ model: "ranker", query, documents: texts, maxChunksPerDoc: 1 });
    return {
      dense: [embedded.embeddings.float],
      scores: [ranked, before].map((answer) => byIndex(answer.results, (each) => each.relevanceScore)),
    };
  },
  async voyageai() {
    const client = new VoyageAIClient({ apiKey, environment: `${url}/v1` });
    const embedded = await client.embed({ model: "dense", input: texts });
    const ranked = await client.rerank({ model: "ranker", query, documents: texts });
    const best = await client.rerank({ model: "ranker", query, documents: texts, topK: 1, returnDocuments: true });
    return {
      dense: [embedded.data.map((each) => each.embedding)],
      scores: [byIndex(ranked.data, (each) => each.relevanceScore)],
      best: best.data.map((each) => each.document),
    };
  },
  async ollama() {
    const client = new Ollama({ host: url });
    const embedded = await client.embed({ model: "dense", input: texts });
    const pulled = await client.pull({ model: "dense" });
    const listed = await client.list();
    const shown = await client.show({ model: "dense" });
    return {
      unit: [embedded.embeddings],
      pulled: pulled.status,
      models: listed.models.map((each) => each.name),
      capabilities: shown.capabilities,
    };
  },
  async ai() {
    const model = createOpenAI({ apiKey, baseURL: `${url}/v1` }).embedding("dense");
    const many = await embedMany({ model, values: texts });
    const one = await embed({ model, value: texts[0] });
    const ranking = createTogetherAI({ apiKey, baseURL: `${url}/v1` }).reranking("ranker");
    const ranked = await rerank({ model: ranking, query, documents: texts });
    return {
      dense: [many.embeddings, [one.embedding, ...many.embeddings.slice(1)]],
      scores: [byIndex(ranked.ranking.map((each) => ({ index: each.originalIndex, score: each.score })), (each) => each.score)],
    };
  },
};

for (const [name, ask] of Object.entries(clients)) {
  console.log(JSON.stringify({ name, ...(await ask()) }));
}
