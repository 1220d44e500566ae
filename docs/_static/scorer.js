// Ranks search results: the glossary and the chapters come first, and pages of the API last. Sphinx reads this object.
var Scorer = {
  score: ([page, , , , score]) => score + (page === "glossary" ? 12 : page.startsWith("chapters/") ? 10 : page.startsWith("api") ? -100 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
