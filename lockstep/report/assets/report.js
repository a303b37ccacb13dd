/* Draws the charts of report.html from the data that stands in the page. */
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const home = document.getElementById("charts");
  for (const figure of data.figures) home.append(lockstep.figure(figure, data.marks).element);
})();
