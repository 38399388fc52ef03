// A drawing of a plan's estimated schedule: a lane per worker and a bar per task, colored by the kind of its stage.
// Hovering over a bar shows the task, its cost and its waits.
#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "compiler/inspect/json.hpp"
#include "compiler/schedule/events_order.hpp"

namespace ark::compiler {

namespace {

constexpr double width = 1400, lane = 22, margin = 90, top = 40;

std::string escaped(const std::string& text) {
  std::string out;
  for (const char letter : text) {
    switch (letter) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += static_cast<unsigned char>(letter) < 0x20 ? ' ' : letter;
    }
  }
  return out;
}

template <typename... Values>
std::string formatted(const char* format, Values... values) {
  char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

}  // namespace

// A wait ends wait_us after the signal of another worker.
std::vector<double> estimated_starts(const Plan& plan) {
  std::vector<double> start(plan.tasks.size(), 0), free(plan.queues.size(), 0);
  std::vector<std::pair<double, int>> met(plan.events.size(), {0, -1});  // last signal, and the worker that sent it
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    const Task& task = plan.tasks[index];
    double at = free[task.worker];
    for (const int event : task.waits) {
      const auto& [signal, by] = met[event];
      at = std::max(at, signal + (by == task.worker ? 0 : plan.target.wait_us));
    }
    start[index] = at;
    free[task.worker] = at + task.cost_us;
    for (const int event : task.signals) met[event] = std::max(met[event], {free[task.worker], task.worker});
  }
  return start;
}

std::string to_svg(const Plan& plan) {
  const char* colours[] = {"#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f"};
  std::map<std::string, const char*> colour_of;  // assigned in order of appearance while colors last
  const std::vector<double> start = estimated_starts(plan);
  double end = 1e-3;
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    end = std::max(end, start[index] + plan.tasks[index].cost_us);
    const std::string& kind = plan.stages[plan.tasks[index].stage].kind;
    colour_of.try_emplace(kind, colours[std::min(colour_of.size(), std::size(colours) - 1)]);
  }
  const double scale = (width - margin - 10) / end;
  const double height = top + lane * static_cast<double>(plan.queues.size()) + 30;
  std::string svg = formatted(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" "
      "font-family=\"sans-serif\" font-size=\"11\">\n",
      width, height);
  double legend = margin;
  for (const auto& [kind, colour] : colour_of) {
    svg += formatted("<rect x=\"%.0f\" y=\"8\" width=\"12\" height=\"12\" fill=\"%s\"/>", legend, colour);
    svg += formatted("<text x=\"%.0f\" y=\"18\">", legend + 16) + escaped(kind) + "</text>\n";
    legend += 40 + 7 * static_cast<double>(kind.size());
  }
  for (size_t worker = 0; worker < plan.queues.size(); ++worker) {
    const double y = top + lane * static_cast<double>(worker);
    svg += formatted("<text x=\"6\" y=\"%.1f\">worker %zu</text>\n", y + 14, worker);
  }
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    const Task& task = plan.tasks[index];
    svg += formatted(
        "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.0f\" fill=\"%s\" stroke=\"white\" "
        "stroke-width=\"0.3\"%s>",
        margin + start[index] * scale, top + lane * task.worker, std::max(0.4, task.cost_us * scale), lane - 4,
        colour_of[plan.stages[task.stage].kind], task.replica ? " opacity=\"0.6\"" : "");
    std::string told = describe(plan, static_cast<int>(index));
    told += formatted(": %.2f us from %.2f", task.cost_us, start[index]);
    for (const int event : task.waits) told += ", waits for event " + std::to_string(event);
    svg += "<title>" + escaped(told) + "</title></rect>\n";
  }
  const double y = top + lane * static_cast<double>(plan.queues.size()) + 16;
  for (int tick = 0; tick <= 10; ++tick) {
    svg += formatted("<text x=\"%.0f\" y=\"%.0f\">%.4g us</text>\n", margin + end * scale * tick / 10 - 20, y,
                     end * tick / 10);
  }
  return svg + "</svg>\n";
}

}  // namespace ark::compiler
