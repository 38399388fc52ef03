// What adds a position to a cache of keys or values: a program that makes each head's row, and where that belongs.
#pragma once

#include <optional>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"

namespace ark::compiler {

struct NewRow {
  Stage stage;
  Value row;                    // what the program stores, dense by head, wherever that lies
  int64_t cache = 0;            // where position 0 lies, in elements of the buffer
  AttentionStage::Added place;  // without the values
};

// Of a stage that writes one position of a cache [1, heads, positions, columns]; none: it writes something else, or in
// another way. Adds values to the graph.
std::optional<NewRow> new_row(Graph& graph, const Stage& writer, const Value& cache);

// The only store of a program that reduces nothing; nullptr: there is another, or none.
RowProgram::Instruction* only_store(RowProgram& program);

}  // namespace ark::compiler
