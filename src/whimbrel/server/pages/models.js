/** Models as /info describes them. */

/** Return the models of /info's answer: {name, names, card, plan, status, ready, outputs}. `names` has the name and those of adapters. */
export function readModels(info) {
  return info.models.map(({ card, plan, status }) => ({
    name: plan.served_name,
    names: [plan.served_name, ...Object.keys(plan.adapters).map((adapter) => `${plan.served_name}:${adapter}`)],
    card,
    plan,
    status,
    ready: status === "ready",
    outputs: Object.keys(card.outputs),
  }));
}

/** Return whether a model is made for an output: "dense", "sparse", "multi_vector", "scores", "token_scores". */
export function gives(model, output) {
  return model.outputs.includes(output);
}

/** Return whether a model's scores are those of pairs of texts, a reranker's, and not classes of a text. */
export function judgesPairs({ card }) {
  return "scores" in card.outputs && Boolean(card.template || card.list_template || card.labels.length <= 1);
}

/** Return whether the model treats queries and documents differently. */
export function hasRoles({ card }) {
  const named = ["query", "document", "passage", "corpus"].some((name) => name in card.prompts);
  return named || card.towers.length > 0 || Object.keys(card.text_formats).length > 0;
}
