//! What the kernel reads of an image and never writes, for whoever launches it: the one list of sections, from which
//! follow how much room they take on a device, what is brought there, and what the launch block says of them.

use crate::image::{Image, Loads};
use bytemuck::NoUninit;
use perpetua_device::worker::ImageView;
use perpetua_device::{queue, turns};
use perpetua_shared::launch::LaunchParams;

/// A section of an image.
pub(super) struct Section<'a> {
    /// What a report calls it.
    pub(super) name: &'static str,
    /// What is in it.
    pub(super) bytes: &'a [u8],
    /// The word of the launch block that says where it lies.
    address: fn(&mut LaunchParams) -> &mut u64,
}

/// The sections of an image, and those that are made of it for the kernel.
pub(super) struct Sections<'a> {
    view: ImageView<'a>,
    loads: Loads<'a>,
    /// Where each binding lies.
    bindings: Vec<u64>,
    /// Bytes of the part of each that one sequence has.
    parts: Vec<u64>,
    /// A record for each task.
    turns: Vec<u32>,
}

impl<'a> Sections<'a> {
    /// Of `image`. They are as large as they will be; what is in them is complete when it is known where its bindings
    /// [lie](Sections::bind).
    pub(super) fn new(image: &'a Image) -> Sections<'a> {
        let view = image.view();
        let n_bindings = image.bindings().len();
        Sections {
            loads: image.loads(),
            bindings: vec![0; n_bindings],
            parts: (0..n_bindings).map(|binding| image.part_bytes(binding)).collect(),
            turns: vec![0; turns::words(&view) * view.tasks.len()],
            view,
        }
    }

    /// The image's bindings lie at `addresses`.
    pub(super) fn bind(&mut self, addresses: Vec<u64>) {
        assert_eq!(addresses.len(), self.bindings.len(), "an address for each binding");
        self.turns = turns::records(&self.view, &addresses, &self.parts);
        self.bindings = addresses;
    }

    /// All of them, in the order in which they lie on a device.
    pub(super) fn list(&self) -> Vec<Section<'_>> {
        let Sections { view, loads, .. } = self;
        vec![
            section("the table of bindings", &self.bindings, |params| &mut params.bindings),
            section("parts", &self.parts, |params| &mut params.parts),
            section("programs", view.programs, |params| &mut params.programs),
            section("tasks", view.tasks, |params| &mut params.tasks),
            section("turns", &self.turns, |params| &mut params.turns),
            section("events", view.events, |params| &mut params.events),
            section("waits", view.waits, |params| &mut params.waits),
            section("triggers", view.triggers, |params| &mut params.triggers),
            section("list heads", view.list_heads, |params| &mut params.list_heads),
            section("lists", view.lists, |params| &mut params.lists),
            section("data heads", loads.data_heads, |params| &mut params.data_heads),
            section("data ops", loads.data, |params| &mut params.data),
            section("prefetch heads", loads.prefetch_heads, |params| &mut params.prefetch_heads),
            section("prefetches", loads.prefetches, |params| &mut params.prefetches),
        ]
    }

    /// What a launch block says of the image, whose sections lie at `addresses`, as many as are
    /// [listed](Sections::list) and in that order. All else in it is zero.
    pub(super) fn launch_params(&self, addresses: impl ExactSizeIterator<Item = u64>) -> LaunchParams {
        let view = &self.view;
        let mut params = LaunchParams {
            n_programs: view.programs.len() as u32,
            n_tasks: view.tasks.len() as u32,
            turn_words: turns::words(view) as u32,
            n_events: view.events.len() as u32,
            n_waits: view.waits.len() as u32,
            n_triggers: view.triggers.len() as u32,
            n_workers: view.n_workers,
            n_slots: queue::slots(view.max_just_in_time()),
            ..LaunchParams::default()
        };
        let sections = self.list();
        assert_eq!(sections.len(), addresses.len(), "an address for each section");
        for (section, address) in sections.iter().zip(addresses) {
            *(section.address)(&mut params) = address;
        }
        params
    }
}

/// Section `name`, of these elements, where the launch block's `address` says.
fn section<'a, T: NoUninit>(
    name: &'static str,
    elements: &'a [T],
    address: fn(&mut LaunchParams) -> &mut u64,
) -> Section<'a> {
    Section { name, bytes: bytemuck::cast_slice(elements), address }
}

/// Words of the counters that the kernel of an image has: see [`LaunchParams::counters`].
pub(super) fn counters(view: &ImageView<'_>) -> usize {
    view.events.len() + queue::words(view.max_just_in_time()) as usize
}
