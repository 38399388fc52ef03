// Attaches host objects to a captured graph as a CUDA user object. When the graph ends, the driver's callback may not
// call the driver, so it only moves the objects to a list that release_ended_graphs() clears.
#include "cuda/graph_owned.hpp"

#include <mutex>
#include <utility>
#include <vector>

namespace ark {

namespace {

struct Ended {
  std::mutex mutex;  // held only to move pointers, because the driver's thread waits for it
  std::vector<std::shared_ptr<const void>> held;
};

// Never destroyed, because graphs may end after this library's other variables.
Ended& ended() {
  static Ended& all = *new Ended;
  return all;
}

using Held = std::shared_ptr<const void>;

void graph_ended(void* held) {
  const std::unique_ptr<Held> own(static_cast<Held*>(held));
  const std::lock_guard lock(ended().mutex);
  ended().held.push_back(std::move(*own));
}

}  // namespace

Capture capture_of(CUstream stream) {
  CUstreamCaptureStatus status{};
  Capture capture;
  check(driver().stream_get_capture_info(stream, &status, &capture.id, &capture.graph, nullptr, nullptr, nullptr),
        "cuStreamGetCaptureInfo");
  return status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? capture : Capture{};
}

void keep_with_graph(const Capture& capture, std::shared_ptr<const void> what) {
  auto held = std::make_unique<Held>(std::move(what));
  CUuserObject object = nullptr;
  check(driver().user_object_create(&object, held.get(), &graph_ended, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
        "cuUserObjectCreate");
  held.release();  // the user object owns it from here on
  const CUresult kept = driver().graph_retain_user_object(capture.graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE);
  if (kept != CUDA_SUCCESS) driver().user_object_release(object, 1);
  check(kept, "cuGraphRetainUserObject");
}

void release_ended_graphs() {
  std::vector<Held> held;
  {
    const std::lock_guard lock(ended().mutex);
    held.swap(ended().held);
  }
}

}  // namespace ark
