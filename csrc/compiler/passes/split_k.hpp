// Products whose tiles are fewer than the workers, cut along their depth ("split-K").
//
// Of a large tile less is read for what it computes, but a product that is deep and narrow has few of them. Here it
// becomes several products, of parts of the depth, each with a result of its own in float32; the stage that reads the
// result (a residual with its norm, say) adds these up as it loads an element, in order, and rounds the sum once, as
// the product would have. So there is no stage in between, and bits depend on shapes and the number of workers alone.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values and buffers to the graph. Only what one row program alone reads is cut; other stages stay as they are.
std::vector<Stage> split_k(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
