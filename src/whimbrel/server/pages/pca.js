/** Principal components of vectors: block power iteration with Rayleigh-Ritz, in slices so that the page stays responsive. */

import { breathe } from "./dom.js";
import { dot, norm } from "./vectors.js";

const BLOCK = 8;
const MAX_ITERATIONS = 200;
const TOLERANCE = 1e-11;
const SLICE = 12; // milliseconds of work between two chances to paint

/**
 * Return {points, shares}: for each vector its coordinates on the first two components, and the share of the variance that each
 * component has. The largest entry of a component is positive, so the picture does not flip from run to run. Throws AbortError.
 */
export async function project(vectors, signal) {
  const rest = slicer(signal);
  const rows = await centred(vectors, rest);
  const width = rows[0].length;
  const size = Math.min(BLOCK, width, rows.length);
  let basis = orthonormal(startingBlock(size, width));
  let values = [];
  for (let round = 0; round < MAX_ITERATIONS; round += 1) {
    const images = [];
    for (const vector of basis) images.push(await covariance(rows, vector, rest));
    const projected = basis.map((left) => images.map((right) => dot(left, right)));
    const { eigenvalues, eigenvectors } = eigen(projected);
    const before = values;
    values = eigenvalues.slice(0, 2);
    const rotated = eigenvectors.map((weights) => combine(images, weights));
    const done = before.length > 0 && values.every((value, place) => Math.abs(value - before[place]) <= TOLERANCE * Math.abs(values[0]));
    if (done || values[0] <= 1e-20) {
      basis = eigenvectors.map((weights) => combine(basis, weights));
      break;
    }
    basis = orthonormal(rotated);
  }
  let total = 0;
  for (const row of rows) total += dot(row, row);
  const axes = [0, 1].map((place) => signed(basis[place] ?? new Float64Array(width)));
  return {
    points: rows.map((row) => axes.map((axis) => dot(row, axis))),
    shares: [0, 1].map((place) => (total > 0 ? (values[place] ?? 0) / total : 0)),
  };
}

function slicer(signal) {
  let since = performance.now();
  return async () => {
    if (performance.now() - since < SLICE) return;
    await breathe();
    signal?.throwIfAborted();
    since = performance.now();
  };
}

async function centred(vectors, rest) {
  const mean = new Float64Array(vectors[0].length);
  for (const vector of vectors) for (let column = 0; column < mean.length; column += 1) mean[column] += vector[column] / vectors.length;
  const rows = [];
  for (const vector of vectors) {
    rows.push(Float64Array.from(vector, (value, column) => value - mean[column]));
    await rest();
  }
  return rows;
}

async function covariance(rows, vector, rest) {
  const image = new Float64Array(vector.length);
  for (const row of rows) {
    const weight = dot(row, vector);
    for (let column = 0; column < image.length; column += 1) image[column] += weight * row[column];
  }
  await rest();
  return image;
}

/** Return vectors that are the same in every run and not orthogonal to much. */
function startingBlock(size, width) {
  let state = 12345;
  const next = () => (state = (Math.imul(state, 1103515245) + 12345) & 0x7fffffff) / 0x7fffffff - 0.5;
  return Array.from({ length: size }, () => Float64Array.from({ length: width }, next));
}

/** Return an orthonormal basis of the same space (modified Gram-Schmidt, twice). Vectors of length 0 are left at 0. */
function orthonormal(block) {
  const basis = [];
  for (const source of block) {
    const vector = Float64Array.from(source);
    const size = norm(vector);
    for (let pass = 0; pass < 2; pass += 1) {
      for (const other of basis) {
        const part = dot(vector, other);
        for (let column = 0; column < vector.length; column += 1) vector[column] -= part * other[column];
      }
    }
    const left = norm(vector);
    const scale = left > 1e-12 * size && left > 0 ? 1 / left : 0;
    basis.push(vector.map((value) => value * scale));
  }
  return basis;
}

function combine(block, weights) {
  const sum = new Float64Array(block[0].length);
  block.forEach((vector, place) => {
    for (let column = 0; column < sum.length; column += 1) sum[column] += weights[place] * vector[column];
  });
  return sum;
}

function signed(axis) {
  const largest = axis.reduce((best, value) => (Math.abs(value) > Math.abs(best) ? value : best), 0);
  return largest < 0 ? axis.map((value) => -value) : axis;
}

/** Return the eigenvalues of a small symmetric matrix, the largest first, and the eigenvector of each (Jacobi rotations). */
function eigen(matrix) {
  const size = matrix.length;
  const values = matrix.map((row, place) => row.map((value, column) => (value + matrix[column][place]) / 2));
  const vectors = values.map((row, place) => row.map((_, column) => (place === column ? 1 : 0)));
  const rotate = (table, [a, b], [c, d], sine, cosine) => {
    const [left, right] = [table[a][b], table[c][d]];
    table[a][b] = cosine * left - sine * right;
    table[c][d] = sine * left + cosine * right;
  };
  for (let sweep = 0; sweep < 30; sweep += 1) {
    for (let p = 0; p < size; p += 1) {
      for (let q = p + 1; q < size; q += 1) {
        if (Math.abs(values[p][q]) < 1e-300) continue;
        const angle = 0.5 * Math.atan2(2 * values[p][q], values[q][q] - values[p][p]);
        const [sine, cosine] = [Math.sin(angle), Math.cos(angle)];
        for (let k = 0; k < size; k += 1) rotate(values, [k, p], [k, q], sine, cosine);
        for (let k = 0; k < size; k += 1) rotate(values, [p, k], [q, k], sine, cosine);
        for (let k = 0; k < size; k += 1) rotate(vectors, [p, k], [q, k], sine, cosine);
      }
    }
  }
  const order = values.map((_, place) => place).sort((a, b) => values[b][b] - values[a][a]);
  return { eigenvalues: order.map((place) => values[place][place]), eigenvectors: order.map((place) => vectors[place]) };
}
