// The stage that appends a position to a cache of keys or values, as a program that makes each head's row and the place
// where the row belongs.
#pragma once

#include <optional>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"

namespace ark::compiler {

struct NewRow {
  Stage stage;
  Value row;                    // what the program stores, dense by head, at any address
  int64_t cache = 0;            // element of the buffer at which position 0 is
  int64_t sequences = 1;        // of a batch, as far as it is known
  AttentionStage::Added place;  // without the values
};

// Describes a stage that writes one position of a cache [1, heads, positions, columns]. Returns nullopt if it writes
// something else or in another form. Adds values to the graph.
std::optional<NewRow> new_row(Graph& graph, const Stage& writer, const Value& cache);

// The only store of a program without reductions; nullptr if there is none or several.
RowProgram::Instruction* only_store(RowProgram& program);

}  // namespace ark::compiler
