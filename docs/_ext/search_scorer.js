// SPDX-License-Identifier: BSD-3-Clause
// Ranks search results: names that begin or end with the query first, attributes and parameters later,
// and pages for contributors and apex's raw modules last.
Scorer.score = ([page, title, anchor, description, score, file, kind]) => {
  const query = (new URLSearchParams(location.search).get("q") || "").trim().toLowerCase();
  const name = title.split(/\.|::/).pop().toLowerCase();
  if (query && kind === "object") {
    if (/attribute|method|property|member|enumerator|parameter/.test(description || "")) score -= 6;
    else if (name.startsWith(query) || name.endsWith(query)) score += 8;
  } else if (query && title.toLowerCase().includes(query)) {
    score += 10;
  }
  if (/^(decisions\/|api\/python\/apex|api\/index|benchmarks|changelog)/.test(page)) score -= 12;
  return score;
};
