/** Vectors from the API, and arithmetic on them. */

import { count } from "./dom.js";

const CHUNK = 64;

/** Return the float32 numbers that base64 holds, in little-endian order. */
export function decodeFloats(base64) {
  if (Uint8Array.fromBase64) return new Float32Array(Uint8Array.fromBase64(base64).buffer);
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let index = 0; index < binary.length; index += 1) bytes[index] = binary.charCodeAt(index);
  return new Float32Array(bytes.buffer);
}

/**
 * Return a Float32Array per text, by /v1/embeddings in chunks. `options` are further fields of the body.
 * `onchunk(vectors, total)` is called after each chunk.
 */
export async function embed(call, model, texts, { say, onchunk, ...options } = {}) {
  const vectors = [];
  for (let start = 0; start < texts.length; start += CHUNK) {
    if (texts.length > CHUNK) say?.(`${count(start, "text")} of ${texts.length} embedded.`, start / texts.length);
    const input = texts.slice(start, start + CHUNK);
    const { data } = await call("/v1/embeddings", { model, input, encoding_format: "base64", ...options });
    for (const row of data.data) vectors.push(decodeFloats(row.embedding));
    onchunk?.(vectors, texts.length);
  }
  return vectors;
}

export function dot(left, right) {
  let sum = 0;
  for (let index = 0; index < left.length; index += 1) sum += left[index] * right[index];
  return sum;
}

export function norm(vector) {
  return Math.sqrt(dot(vector, vector));
}

/** Return the cosine of two vectors, 0 where one is zero. */
export function cosine(left, right) {
  const product = norm(left) * norm(right);
  return product === 0 ? 0 : dot(left, right) / product;
}
